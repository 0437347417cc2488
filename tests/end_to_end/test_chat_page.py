"""Tests of the chat page in Chromium against a whole fleet."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.chromium import Complaints, running_browser

from .fleet_process import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

    from .fleet_process import FleetProcess

pytestmark = pytest.mark.slow

ANSWER_WAIT_MS = 1000 * PATIENCE_S
COUNTED = re.compile(r"^\d+ tokens?$")
"""Pattern of the server's token count; the page marks its own count as a lower bound."""
ASK_AND_AT_FIRST_TEXT = """(then) => new Promise((done) => {
  const watch = new MutationObserver(() => {
    const text = document.querySelector(".answer .text")?.textContent;
    if (!text) return;
    watch.disconnect();
    if (then === "stop") document.getElementById("stop").click();
    if (then === "cut") sockets.at(-1).close();
    done(text);
  });
  watch.observe(document.body, {subtree: true, characterData: true, childList: true});
  document.querySelector(".suggestion").click();
})"""
"""Runs in the page, because an answer ends faster than a test can react from outside."""
REGENERATE_AND_SEE = """() => new Promise((seen) => {
  const look = () => {
    if (!document.getElementById("stop").checkVisibility()) return;
    watch.disconnect();
    seen(true);
  };
  const watch = new MutationObserver(look);
  watch.observe(document.body, {subtree: true, attributes: true});
  [...document.querySelectorAll(".regenerate")].at(-1).click();
})"""

LONG_ANSWERS = """(() => {
  const send = WebSocket.prototype.send;
  WebSocket.prototype.send = function (text) {
    const asked = JSON.parse(text);
    if (asked.type === "response.create") {
      const max_output_tokens = window.longest ?? 900;
      Object.assign(asked, {ignore_eos: true, max_output_tokens, temperature: 0});
    }
    send.call(this, JSON.stringify(asked));
  };
})()"""
"""The page's request, with the maximum length of the test or of the context."""
SHORT = "window.longest = 40"
RESUMED = "window.longest = 300"
"""Longer than a reconnect, so that the rest streams too."""
KEEP_SOCKETS = """(() => {
  window.sockets = [];
  window.sent = [];
  const send = WebSocket.prototype.send;
  WebSocket.prototype.send = function (text) {
    if (sockets.at(-1) !== this) sockets.push(this);
    sent.push(text);
    send.call(this, text);
  };
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium."""
    with running_browser() as browser:
        yield browser


@contextmanager
def opened(browser: Browser, fleet: FleetProcess, *scripts: str) -> Iterator[Page]:
    """The connected page; afterwards Chromium's console must have no errors."""
    page = browser.new_page(viewport={"width": 1000, "height": 700})
    for script in scripts:
        page.add_init_script(script)
    complaints = Complaints()
    with complaints.of(page):
        page.goto(fleet.url)
        expect(page.locator("#link")).to_have_text("Connected")
        # The model's suggestions are shown.
        expect(page.locator("#welcome")).to_have_attribute("data-words", "shown")
        yield page
    page.close()
    assert not complaints.unexpected


@pytest.fixture
def page(browser: Browser, fleet: FleetProcess) -> Iterator[Page]:
    with opened(browser, fleet) as page:
        yield page


@pytest.fixture
def long_page(browser: Browser, fleet: FleetProcess) -> Iterator[Page]:
    """A fleet with long answers."""
    with opened(browser, fleet, LONG_ANSWERS) as page:
        yield page


def ended(fleet: FleetProcess, outcome: str) -> float:
    return fleet.metric("triolet_requests_total", outcome=outcome)


def left(fleet: FleetProcess) -> float:
    """Return the number of answers that ended because the client left or stopped them."""
    return ended(fleet, "client_gone") + ended(fleet, "stopped")


@pytest.mark.promise
def test_a_chat_of_two_turns_streams_and_shows_its_figures(page: Page) -> None:
    field = page.get_by_role("textbox", name="Your question")
    regenerate = page.get_by_role("button", name="Regenerate")
    for turn, question in enumerate(("Hello!", "Tell me a story about a dragon.")):
        field.fill(question)
        field.press("Enter")
        expect(page.locator(".turn")).to_have_count(turn + 1)
        expect(regenerate).to_be_visible(timeout=ANSWER_WAIT_MS)
        expect(page.locator(".answer .text").last).not_to_be_empty()
        facts = page.locator(".facts").last
        expect(facts).to_contain_text(re.compile(r"TTFT\s*[\d,]+ ms"))
        expect(facts.locator(".tokens")).to_have_text(COUNTED)
    expect(page.locator(".facts").last).to_contain_text(re.compile(r"[\d.,]+ tokens/s"))
    assert page.evaluate(REGENERATE_AND_SEE), "while it runs it can be stopped"
    expect(regenerate).to_be_visible(timeout=ANSWER_WAIT_MS)
    expect(page.locator(".turn")).to_have_count(2)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_the_page_names_the_served_model(page: Page, fleet: FleetProcess) -> None:
    listed = fleet.client.get("/v1/models").json()
    expect(page.locator("#model")).to_have_text(listed["data"][0]["id"])


def test_a_question_beyond_the_context_offers_a_new_chat(page: Page) -> None:
    field = page.get_by_role("textbox", name="Your question")
    field.fill("And then the dragon slept. " * 1000)
    field.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("too long for the model")
    page.get_by_role("button", name="Start a new chat").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_stop_ends_the_answer_in_the_pools_too(long_page: Page, fleet: FleetProcess) -> None:
    page = long_page
    before = ended(fleet, "stopped")
    page.evaluate(ASK_AND_AT_FIRST_TEXT, "stop")
    expect(page.locator(".facts").last).to_contain_text("Stopped")
    fleet.wait_all_blocks_free()
    wait_until(lambda: ended(fleet, "stopped") == before + 1, PATIENCE_S, "the stop was counted")
    # The server's count comes with the end of the answer.
    expect(page.locator(".tokens").last).to_have_text(COUNTED)
    page.evaluate(SHORT)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible(timeout=ANSWER_WAIT_MS)


def test_closing_the_tab_frees_the_kv(browser: Browser, fleet: FleetProcess) -> None:
    before = left(fleet) + ended(fleet, "length")
    with opened(browser, fleet, LONG_ANSWERS) as page:
        page.evaluate(ASK_AND_AT_FIRST_TEXT, "look")
    # It may finish within the time in which the page may reconnect.
    wait_until(
        lambda: left(fleet) + ended(fleet, "length") == before + 1, PATIENCE_S, "it has ended"
    )
    fleet.wait_all_blocks_free()


def test_an_answer_survives_its_connection(browser: Browser, fleet: FleetProcess) -> None:
    with opened(browser, fleet, LONG_ANSWERS, RESUMED, KEEP_SOCKETS) as page:
        page.evaluate(ASK_AND_AT_FIRST_TEXT, "cut")
        expect(page.get_by_role("button", name="Regenerate")).to_be_visible(timeout=ANSWER_WAIT_MS)
        cut = page.locator(".answer .text").last.inner_text()
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.locator(".tokens").last).to_have_text(COUNTED)
        asked = page.evaluate("sent.map((text) => JSON.parse(text).type)")
    assert asked == ["response.create", "response.resume"]
    with opened(browser, fleet, LONG_ANSWERS, RESUMED) as page:
        page.locator(".suggestion").first.click()
        expect(page.get_by_role("button", name="Regenerate")).to_be_visible(timeout=ANSWER_WAIT_MS)
        assert page.locator(".answer .text").last.inner_text() == cut, "as if nothing had happened"


@pytest.mark.promise
def test_the_dashboard_shows_the_fleet_at_work(browser: Browser, fleet: FleetProcess) -> None:
    with opened(browser, fleet) as page:
        page.get_by_role("link", name="Dashboard").click()
        expect(page.locator("#fresh")).to_have_text("Live")
        expect(page.locator(".worker")).to_have_count(len(fleet.audit().workers))
        expect(page.locator(".worker").first).to_contain_text("alive")
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
        assert fleet.client.post("/v1/chat/completions", json=body).status_code == 200
        figure = page.locator(".tile[data-figure=ttft50] .value")
        expect(figure).to_contain_text("s", timeout=ANSWER_WAIT_MS)
        expect(page.locator("#budgets li")).to_have_count(5)
        # The server samples every second here (conftest.py), the page asks every ten.
        points = page.locator(".chart", has_text="Time to first token").locator("path.line").first
        expect(points).to_have_attribute("d", re.compile("^M"), timeout=ANSWER_WAIT_MS)
        page.get_by_role("link", name="Chat").click()
        expect(page.locator("#link")).to_have_text("Connected")
