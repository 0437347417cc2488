"""`python -m tools.screenshot`: take the documentation's pictures of the chat page and dashboard.

Starts a server, chats with the demo model in Chromium, and writes screenshots to docs/images. The
picture of the dashboard is taken while other clients send requests; the rollout in its picture is
an example, because a real one takes minutes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
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
"""Charts get a point every two seconds, so that their lines show in the picture."""
STARTED = time.time() - 300
ROLLOUT: dict[str, object] = {
    "id": "example",
    "model": "chat",
    "stable": "chat",
    "candidate": "chat-2",
    "candidate_digest": "sha256:9b1f0c54d7aa",
    "phase": "canary",
    "step": 2,
    "shares": [0.01, 0.1, 0.5, 1.0],
    "share": 0.1,
    "route_valid_s": 8.0,
    "began_at": STARTED + 120,
    "said": "chat-2 has had 148 requests from 17 buckets of users; it needs 200 from 20",
    "counts": {
        "errors": [1394, 6, 147, 1],
        "rejected": [1398, 2, 148, 0],
        "ttft": [1179, 21, 119, 3],
        "itl": [1360, 30, 144, 3],
    },
    "recent": {
        "errors": [402, 2, 43, 0],
        "rejected": [404, 0, 43, 0],
        "ttft": [391, 7, 40, 1],
        "itl": [395, 8, 42, 1],
    },
    "cost": [0.97, 1.06],
    "shadow_share": 0.0,
    "zones": [],
    "shadow": {
        "pairs": 412,
        "failed": 0,
        "skipped": 31,
        "rows_while_waiting": 0,
        "same_finish": 407,
        "equal_tokens": 20_318,
        "tokens": [21_010, 20_987],
        "ttft_s": [49.4, 50.6],
        "itl_s": [7.0, 7.1],
    },
    "excluded_tenants": [],
    "history": [
        {"at": STARTED + at_s, "phase": phase, "step": step, "said": said, "actor": actor}
        for at_s, phase, step, said, actor in (
            (0, "preparing", 0, "started, to chat:v2", "alice"),
            (20, "shadow", 0, "requests are copied to the candidate", ""),
            (50, "canary", 1, "412 shadow copies were compared, 0 failed", ""),
            (120, "canary", 2, "step 1 has passed: the lowest p is 0.61, for errors", ""),
        )
    ],
}
FIGURES = {
    "chat": {"ttft_p50_s": [0.118], "ttft_p99_s": [0.402]},
    "chat-2": {"ttft_p50_s": [0.121], "ttft_p99_s": [0.398]},
}
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
        take_rollout(page, folder / "rollouts.png")
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


def take_rollout(page: Page, picture: Path) -> None:
    """Take a picture of an example of a rollout on the dashboard."""
    history = {"at_s": [], "all": {}, "models": FIGURES, "tenants": {}, "objectives": {}}
    dashboard = page.context.new_page()
    dashboard.route("**/fleet/rollouts", lambda route: route.fulfill(json={"data": [ROLLOUT]}))
    dashboard.route("**/fleet/history", lambda route: route.fulfill(json=history))
    dashboard.goto(page.url.partition("#")[0] + "dashboard")
    dashboard.get_by_text("History", exact=True).click()
    dashboard.get_by_text("398 ms").wait_for()
    dashboard.locator("section", has=dashboard.locator("#rollouts")).screenshot(path=picture)


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
