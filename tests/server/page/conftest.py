"""Fixtures for tests of the web pages: Chromium on a page of a server that the test controls."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from ops.ports import bind_port
from tests.chromium import Complaints, running_browser

from .chat_page import ChatPage
from .fake_server import WAIT_S, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page, ViewportSize

VIEWPORT: ViewportSize = {"width": 1000, "height": 700}


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of the page."""
    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="package")
def port() -> Iterator[int]:
    """The port of one server after the other, so that the browser may keep scripts and styles. It
    is held for as long as one may come, so that no other process gets it."""
    with bind_port("127.0.0.1", 0) as kept:
        yield kept.getsockname()[1]


@pytest.fixture
def server(port: int) -> Iterator[FakeServer]:
    """A server that says what the test says."""
    server = FakeServer(port)
    yield server
    server.stop_for_good()


@pytest.fixture(scope="package")
def shared_page(browser: Browser) -> Iterator[Page]:
    """One page for most tests: a new one costs more than most of them."""
    page = new_page(browser)
    yield page
    page.context.close()


@pytest.fixture
def chat(shared_page: Page, server: FakeServer) -> Iterator[ChatPage]:
    """The page, open and connected; afterwards Chromium must have had nothing to complain about."""
    shared_page.set_viewport_size(VIEWPORT)
    shared_page.emulate_media(color_scheme="light")
    with opened(shared_page, server) as chat:
        yield chat
        # The next test has the same origin in the same tab.
        chat.page.evaluate("sessionStorage.clear()")


@pytest.fixture
def tab_chat(shared_page: Page, server: FakeServer) -> Iterator[ChatPage]:
    """The same in a tab of its own, for tests that change what outlives a load: scripts, keys."""
    page = shared_page.context.new_page()
    with opened(page, server) as chat:
        yield chat
    page.close()


@pytest.fixture
def own_chat(browser: Browser, server: FakeServer) -> Iterator[ChatPage]:
    """The same in a browser profile of its own, for tests that change what all tabs share: the
    clock, permissions. It has kept no scripts, so it costs twice as much as the others."""
    page = new_page(browser)
    with opened(page, server) as chat:
        yield chat
    page.context.close()


def new_page(browser: Browser) -> Page:
    context = browser.new_context(viewport=VIEWPORT, color_scheme="light")
    context.set_default_timeout(WAIT_S * 1000)
    return context.new_page()


@contextmanager
def opened(page: Page, server: FakeServer) -> Iterator[ChatPage]:
    complaints = Complaints()
    with complaints.of(page):
        page.goto(server.url)
        chat = ChatPage(page, complaints)
        expect(chat.link).to_have_text("Connected")
        yield chat
        page.goto("about:blank")
        forget(page, server)
    assert not complaints.unexpected


def forget(page: Page, server: FakeServer) -> None:
    """Leave nothing of this server's in the browser: another one may get its port."""
    devtools = page.context.new_cdp_session(page)
    what = {"origin": server.url.rstrip("/"), "storageTypes": "local_storage"}
    devtools.send("Storage.clearDataForOrigin", what)
    devtools.detach()
