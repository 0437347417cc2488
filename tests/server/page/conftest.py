"""Chromium on the page of a server that the test directs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.chromium import Complaints, running_browser

from .chat_page import ChatPage
from .fake_server import WAIT_S, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

expect.set_options(timeout=WAIT_S * 1000)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of the page."""
    with running_browser() as browser:
        yield browser


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server that says what the test says."""
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture
def chat(browser: Browser, server: FakeServer) -> Iterator[ChatPage]:
    """The page, open and connected; afterwards Chromium must have had nothing to complain about."""
    context = browser.new_context(viewport={"width": 1000, "height": 700}, color_scheme="light")
    context.set_default_timeout(WAIT_S * 1000)
    page = context.new_page()
    complaints = Complaints(page)
    page.goto(server.url)
    chat = ChatPage(page, complaints)
    expect(chat.link).to_have_text("Connected")
    yield chat
    context.close()
    assert not complaints.unexpected
