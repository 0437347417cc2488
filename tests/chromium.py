"""Test helper that runs Chromium for the tests of the web pages, and records its console errors."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect, sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, ConsoleMessage, Error, Page

PROGRAMS = ("chromium-headless-shell", "chromium")
"""The first draws no windows, and takes half of the other's CPU time in these tests."""
ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    " --disable-background-networking --disable-component-update --disable-sync"
).split()
PATIENCE_S = 60.0

expect.set_options(timeout=PATIENCE_S * 1000)


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Run Chromium without a window; skip the test if it is not installed."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        package = PROGRAMS[0]
        pytest.skip(f"{package} is not installed: `apt-get install {package}` brings it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


class Complaints:
    """The browser's console messages: script errors, blocked content, failed requests."""

    def __init__(self) -> None:
        self._heard: list[str] = []
        self._allowed: list[str] = []

    @contextmanager
    def of(self, page: Page) -> Iterator[None]:
        """Record a page's messages."""
        page.on("console", self._console)
        page.on("pageerror", self._error)
        try:
            yield
        finally:
            page.remove_listener("console", self._console)
            page.remove_listener("pageerror", self._error)

    def allow(self, *containing: str) -> None:
        """Expect messages that contain these texts, past or future."""
        self._allowed += containing

    @property
    def unexpected(self) -> list[str]:
        """Messages that no test provoked on purpose."""
        return [text for text in self._heard if not any(a in text for a in self._allowed)]

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning", "assert"}:
            self._heard.append(f"{message.type}: {message.text}")

    def _error(self, error: Error) -> None:
        self._heard.append(f"uncaught: {error}")
