"""`python -m loadtest.screenshot`: a picture of the chat page, for the documentation.

Starts a server, asks the demo model two questions in Chromium and keeps what a reader sees in
docs/images/chat.png.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import sync_playwright

from .server_process import running_server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playwright.sync_api import Page

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "chat.png"
QUESTIONS = ("Tell me a story about a dragon named Ember.", "What is 12 + 30?")
WIDTH, HEIGHT = 1000, 720
ANSWER_WAIT_MS = 60_000


def ask(page: Page, question: str) -> None:
    """Ask, and wait until the answer is complete."""
    field = page.get_by_role("textbox", name="Your question")
    field.fill(question)
    field.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for(timeout=ANSWER_WAIT_MS)


def take(url: str, picture: Path, scheme: str) -> None:
    """Chat at this address and keep the picture."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"],
        )
        page = browser.new_page(
            viewport={"width": WIDTH, "height": HEIGHT},
            device_scale_factor=2,
            color_scheme="dark" if scheme == "dark" else "light",
        )
        page.goto(url)
        page.get_by_text("Connected", exact=True).wait_for()
        for question in QUESTIONS:
            ask(page, question)
        page.screenshot(path=picture)
        browser.close()


def main(arguments: Sequence[str]) -> int:
    """Take the picture and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.screenshot", description="Take a picture of the chat page."
    )
    parser.add_argument("--url", help="use this server and start none")
    parser.add_argument("--out", type=Path, default=PICTURE, help="where to write (docs/images)")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.url:
        take(options.url, options.out, options.scheme)
        return 0
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server((), Path(folder) / "server.log") as url,
    ):
        take(url, options.out, options.scheme)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
