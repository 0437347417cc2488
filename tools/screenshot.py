"""`python -m tools.screenshot`: take the documentation's pictures of the chat page and dashboard.

Starts a server, chats with the demo model in Chromium, and writes screenshots to docs/images. The
picture of the dashboard is taken while other clients send requests.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import sync_playwright

from loadtest.harness.servers import running_server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playwright.sync_api import Page, ViewportSize

IMAGES = Path(__file__).parents[1] / "docs" / "images"
EARLIER = ("Reverse the word lamp.", "Who are you?")
"""Questions of earlier chats, for the list of chats."""
QUESTIONS = ("Tell me a story about a dragon named Ember.", "What is 12 + 30?")
CHAT_SIZE: ViewportSize = {"width": 1200, "height": 720}
DASHBOARD_SIZE: ViewportSize = {"width": 1200, "height": 1500}
SCALE = 1.25
"""Device pixels per CSS pixel: sharp enough, and small enough for the repository."""
ANSWER_WAIT_MS = 60_000
NUM_LOOKS = 24
"""Dashboard refreshes before its picture is taken."""
SAMPLED = ("--set", "server.sample_s=2")
"""Charts get a point every two seconds, so that the picture shows lines."""
SETTINGS = """localStorage["triolet.settings"] = '{"temperature": "0"}'"""
"""Temperature 0, for the same answers in every picture."""
OTHERS = """async (model) => {
  const ask = async () => {
    const body = JSON.stringify({model, stream: true, max_tokens: 400, ignore_eos: true,
      messages: [{role: "user", content: `Tell me a story about ${Math.random()}.`}]});
    const headers = {"content-type": "application/json"};
    await (await fetch("/v1/chat/completions", {method: "POST", headers, body})).text();
  };
  for (let n = 0; n < 4; n += 1) (async () => { for (;;) await ask(); })();
}"""
"""Four clients that send requests as long as their page is open."""


def ask(page: Page, question: str) -> None:
    """Send a question and wait until the answer is complete."""
    field = page.get_by_role("textbox", name="Your question")
    field.fill(question)
    field.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for(timeout=ANSWER_WAIT_MS)


def take(url: str, folder: Path, scheme: str) -> None:
    """Chat at this address, open the dashboard, and save the pictures."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell") or shutil.which("chromium"),
            args=["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"],
        )
        page = browser.new_context(
            viewport=CHAT_SIZE,
            device_scale_factor=SCALE,
            color_scheme="dark" if scheme == "dark" else "light",
        ).new_page()
        page.add_init_script(SETTINGS)
        page.goto(url)
        page.get_by_text("Connected", exact=True).wait_for()
        for question in EARLIER:
            ask(page, question)
            page.get_by_role("button", name="New chat", exact=True).click()
        for question in QUESTIONS:
            ask(page, question)
        page.mouse.move(0, 0)
        page.screenshot(path=folder / "chat.png")
        take_dashboard(page, folder / "dashboard.png")
        browser.close()


def take_dashboard(page: Page, picture: Path) -> None:
    """Take a picture of the dashboard while the fleet is busy."""
    dashboard = page.context.new_page()
    dashboard.set_viewport_size(DASHBOARD_SIZE)
    dashboard.goto(page.url.partition("#")[0] + "dashboard")
    page.evaluate(OTHERS, page.locator("#model").text_content())
    for _ in range(NUM_LOOKS):
        with dashboard.expect_response("**/fleet/status"):
            pass
    dashboard.screenshot(path=picture)
    budgets = dashboard.locator("section", has=dashboard.locator("#budgets"))
    budgets.screenshot(path=picture.with_name("error_budgets.png"))


def main(arguments: Sequence[str]) -> int:
    """Take the pictures and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.screenshot", description="Take pictures of the pages."
    )
    parser.add_argument("--url", help="use this server instead of starting one")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder to write to (docs/images)")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.url:
        take(options.url, options.out, options.scheme)
        return 0
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(SAMPLED, Path(folder) / "server.log") as url,
    ):
        take(url, options.out, options.scheme)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
