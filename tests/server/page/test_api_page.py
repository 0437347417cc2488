"""Tests of the API page on a real server: it shows every endpoint with its fields, and sends
requests."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import pytest
import trio
from playwright.sync_api import expect

from server.routes import ROUTES
from tests.chromium import Complaints
from tests.server.support.surface import PATIENCE_S, surface
from tests.server.support.tenants import tenancy_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def served(*, has_keys: bool) -> Iterator[str]:
    """Run a server beside the browser, in a thread of its own."""
    began, addresses, stops = threading.Event(), [], []

    async def serve() -> None:
        tenancy = tenancy_of(alice="key-of-alice") if has_keys else None
        stop = trio.Event()
        async with surface(tenancy=tenancy) as server:
            addresses.append(server.url)
            stops.append((trio.lowlevel.current_trio_token(), stop))
            began.set()
            await stop.wait()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert began.wait(PATIENCE_S)
    try:
        yield addresses[0]
    finally:
        ((token, stop),) = stops
        token.run_sync_soon(stop.set)
        thread.join(PATIENCE_S)
    assert not thread.is_alive()


@contextlib.contextmanager
def opened(browser: Browser, url: str) -> Iterator[tuple[Page, Complaints]]:
    complaints = Complaints()
    page = browser.new_page()
    try:
        with complaints.of(page):
            page.goto(f"{url}/docs")
            yield page, complaints
    finally:
        page.close()
    assert complaints.unexpected == []


def row(page: Page, path: str) -> Locator:
    return page.locator(".operation", has=page.get_by_text(path, exact=True)).first


@pytest.mark.promise
def test_every_endpoint_is_shown_and_a_request_is_answered(browser: Browser) -> None:
    with served(has_keys=False) as url, opened(browser, url) as (page, _):
        expect(page.locator(".operation")).to_have_count(
            sum(route.entry is not None for route in ROUTES.rows)
        )
        expect(page.locator("#ask-key")).to_be_hidden()
        page.get_by_label("Find").fill("chat completion")
        expect(page.locator(".operation:visible")).to_have_count(2)
        chat = row(page, "/v1/chat/completions")
        chat.locator("summary").first.click()
        expect(chat.locator(".field-name", has_text="temperature").first).to_be_visible()
        expect(chat.get_by_text("required").first).to_be_visible()
        chat.get_by_role("button", name="Send").click()
        expect(chat.locator(".outcome pre")).to_contain_text("Hello there")
        expect(chat.locator(".outcome p")).to_contain_text("200")
        page.get_by_label("Find").fill("nothing like that")
        expect(page.locator("#nothing")).to_be_visible()


def test_a_stream_and_an_error_are_shown_and_a_key_is_sent(browser: Browser) -> None:
    with served(has_keys=True) as url, opened(browser, url) as (page, complaints):
        complaints.allow("401")
        page.get_by_label("Find").fill("/api/chat")
        chat = row(page, "/api/chat")
        chat.locator("summary").first.click()
        chat.get_by_role("button", name="Send").click()
        expect(chat.locator(".outcome p")).to_contain_text("401")
        page.get_by_label("API key").fill("key-of-alice")
        chat.get_by_role("button", name="Send").click()
        expect(chat.locator(".outcome p")).to_contain_text("200")
        expect(chat.locator(".outcome pre")).to_contain_text('"done":true')
        assert page.evaluate("localStorage.length") == 0


def test_fields_are_described_the_model_first_and_with_bounds_to_the_last_digit(
    browser: Browser,
) -> None:
    with served(has_keys=False) as url, opened(browser, url) as (page, _):
        chat = row(page, "/v1/chat/completions")
        chat.locator("summary").first.click()
        fields = chat.locator(".fields").first.locator("> *")
        expect(fields.nth(0)).to_contain_text("Name of a served model")
        expect(fields.nth(1)).to_contain_text("The conversation, oldest turn first.")
        seed = fields.filter(has_text="Seed for reproducible sampling")
        expect(seed).to_contain_text("≥ -9223372036854775808, ≤ 9223372036854775807")
