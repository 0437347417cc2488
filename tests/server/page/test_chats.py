"""Tests of the chat page's list of chats: stored in the browser, shared between tabs, bounded, and
usable without storage."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from .chat_page import answered, begun
from .conftest import new_page, opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

    from .chat_page import ChatPage
    from .fake_server import FakeServer

pytestmark = pytest.mark.slow

FORBID = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no'); }})"
FULL = """() => {
  Storage.prototype.setItem = () => {
    throw new DOMException("no room", "QuotaExceededError");
  };
}"""


def titles(page: Page) -> Locator:
    return page.locator(".chat-title")


def converse(chat: ChatPage, server: FakeServer, question: str, answer: str = "Yes.") -> None:
    """Ask and be answered, in a chat of its own."""
    chat.button("New chat").click()
    answered(chat, server, question, answer, tokens=2)


def delete(chat: ChatPage, title: str) -> None:
    """Delete a chat; what can be done with one is shown where the mouse is."""
    titles(chat.page).filter(has_text=title).hover()
    chat.button(f"Delete {title}").click()


def test_chats_outlive_the_page_and_go_on(chat: ChatPage, server: FakeServer) -> None:
    converse(chat, server, "One?", "**First.**")
    converse(chat, server, "Two?", "Second.")
    chat.reload()
    expect(titles(chat.page)).to_have_text(["Two?", "One?"])
    expect(chat.answer).to_have_text("Second.")
    expect(chat.facts).to_contain_text("2 tokens")
    chat.button("One?").click()
    expect(chat.answer.locator("strong")).to_have_text("First.")
    expect(chat.button("One?")).to_have_attribute("aria-current", "page")
    chat.ask("And now?")
    exchange = server.next_exchange()
    assert exchange.messages == [
        ("user", "One?"),
        ("assistant", "**First.**"),
        ("user", "And now?"),
    ]
    exchange.created().say("Now.").complete(2)
    expect(titles(chat.page)).to_have_text(["One?", "Two?"])
    chat.page.go_back()
    expect(chat.answer).to_have_text("Second.")


def test_an_answer_goes_on_while_another_chat_is_read(chat: ChatPage, server: FakeServer) -> None:
    converse(chat, server, "One?")
    chat.button("New chat").click()
    exchange = begun(chat, server, "Tell me a story.", "Once upon")
    chat.button("One?").click()
    expect(chat.answer).to_have_text("Yes.")
    expect(chat.button("Send")).to_be_visible()
    exchange.say(" a time")
    chat.button("Tell me a story., answering").click()
    expect(chat.answer).to_have_text("Once upon a time")
    expect(chat.button("Stop the answer")).to_be_visible()
    chat.button("One?").click()
    exchange.complete(5)
    chat.button("Tell me a story.").click()
    expect(chat.facts).to_contain_text("5 tokens")


def test_a_page_that_is_loaded_again_goes_on_with_its_answers(
    chat: ChatPage, server: FakeServer
) -> None:
    left = begun(chat, server, "Tell me a story.", "Once upon")
    expect(chat.page).to_have_title("Tell me a story. · Triolet")
    ttft = chat.facts.locator(".ttft").inner_text()
    chat.page.reload()
    left.wait_connection_closed()
    assert left.close_code == 1001, "the server waits for a shorter time"
    resumed = server.next_exchange()
    assert resumed.request == {
        "type": "response.resume",
        "response_id": "resp_answer-1",
        "stream_id": "answer-1",
        "sequence_number": 1,
    }
    expect(chat.answer).to_have_text("Once upon")
    expect(chat.button("Stop the answer")).to_be_visible()
    resumed.say(" a time")
    expect(chat.answer).to_have_text("Once upon a time")
    resumed.complete(4)
    expect(chat.facts).to_contain_text("4 tokens")
    expect(chat.facts.locator(".ttft")).to_have_text(ttft)
    chat.ask("And then?")
    second = server.next_exchange()
    assert second.request["stream_id"] == "answer-2"
    second.created().say("The end.").complete(2)
    expect(chat.answer).to_have_text("The end.")


def test_who_spoke_and_how_fast_stays_when_the_page_is_loaded_again(
    own_chat: ChatPage, server: FakeServer
) -> None:
    own_chat.page.clock.install()
    role = own_chat.page.locator(".answer .role").last
    ttft, speed = own_chat.facts.locator(".ttft"), own_chat.facts.locator(".speed")
    own_chat.ask("Tell me a story.")
    exchange = server.next_exchange().created().think("A story?").say("Once ")
    expect(own_chat.answer).to_have_text("Once")
    own_chat.page.clock.fast_forward(100)
    exchange.say("upon")
    expect(speed).to_contain_text("tokens/s")
    shown = role.inner_text(), ttft.inner_text(), speed.inner_text()
    assert shown[0] == "triolet-demo"

    own_chat.page.reload()
    resumed = server.next_exchange()
    expect(own_chat.facts).to_contain_text("≥ 3 tokens")
    resumed.say(" a time.")
    expect(own_chat.facts).to_contain_text("≥ 4 tokens")
    resumed.complete(40)
    expect(own_chat.facts.locator(".tokens")).to_have_text("40 tokens")
    assert (role.inner_text(), ttft.inner_text(), speed.inner_text()) == shown

    own_chat.page.reload()
    expect(own_chat.facts.locator(".tokens")).to_have_text("40 tokens")
    assert (role.inner_text(), ttft.inner_text(), speed.inner_text()) == shown


def test_an_answer_that_a_killed_server_has_lost_is_said_to_be_when_the_page_is_loaded_again(
    chat: ChatPage, server: FakeServer
) -> None:
    begun(chat, server, "Tell me a story.", "Once upon")
    chat.page.reload()
    server.next_exchange().refuse(404, "not_found", "there is no such response")
    expect(chat.problem).to_contain_text("The connection broke")
    expect(chat.answer).to_have_text("Once upon")
    chat.page.reload()
    expect(chat.problem).to_contain_text("The connection broke")
    assert server.is_quiet


def test_a_page_that_leaves_stops_an_answer_that_has_no_name_yet(
    chat: ChatPage, server: FakeServer
) -> None:
    chat.ask("Tell me a story.")
    exchange = server.next_exchange()
    chat.page.reload()
    exchange.wait_cancelled()
    expect(chat.facts).to_contain_text("Stopped")
    chat.button("Regenerate").click()
    server.next_exchange().created().say("There was").complete(2)
    expect(chat.answer).to_have_text("There was")


def test_a_chat_can_be_renamed_without_a_mouse(chat: ChatPage, server: FakeServer) -> None:
    converse(chat, server, "One?")
    keys = chat.page.keyboard
    chat.button("Rename One?").focus()
    keys.press("Enter")
    expect(chat.page.get_by_role("textbox", name="Name of the chat")).to_be_focused()
    keys.type("  A   <b>better</b> name ")
    keys.press("Enter")
    expect(titles(chat.page)).to_have_text("A <b>better</b> name")
    expect(chat.button("Rename A <b>better</b> name")).to_be_focused()
    keys.press("Enter")
    keys.type("x")
    keys.press("Escape")
    keys.press("Enter")
    chat.page.get_by_role("textbox", name="Name of the chat").fill("")
    keys.press("Enter")
    chat.page.reload()
    expect(titles(chat.page)).to_have_text("A <b>better</b> name")


def test_a_deleted_chat_comes_back_when_that_was_not_meant(
    chat: ChatPage, server: FakeServer
) -> None:
    converse(chat, server, "One?", "First.")
    converse(chat, server, "Two?", "Second.")
    delete(chat, "Two?")
    expect(titles(chat.page)).to_have_text(["One?"])
    expect(chat.page.get_by_text("What would you like to ask?")).to_be_visible()
    expect(chat.button("Undo")).to_be_focused()
    chat.page.keyboard.press("Enter")
    expect(titles(chat.page)).to_have_text(["Two?", "One?"])
    chat.button("Two?").click()
    expect(chat.answer).to_have_text("Second.")
    chat.button("Delete all").click()
    expect(chat.page.get_by_text("2 chats deleted.")).to_be_visible()
    chat.button("Dismiss").click()
    expect(chat.button("Undo")).to_be_hidden()
    chat.reload()
    expect(titles(chat.page)).to_have_count(0)
    assert chat.page.evaluate("Object.keys(localStorage).filter(k => k.includes('chat.'))") == []


def test_deleting_a_chat_ends_its_answer(chat: ChatPage, server: FakeServer) -> None:
    exchange = begun(chat, server, "Tell me a story.", "Once")
    chat.page.get_by_role("button", name="Delete Tell me a story.").click()
    exchange.wait_cancelled()
    exchange.say(" upon").incomplete(2)
    chat.round_trip()
    expect(titles(chat.page)).to_have_count(0)


def test_a_browser_that_keeps_nothing_is_said_to(tab_chat: ChatPage, server: FakeServer) -> None:
    tab_chat.page.add_init_script(FORBID)
    tab_chat.reload()
    expect(tab_chat.page.get_by_text("This browser blocks storage for this page")).to_be_visible()
    converse(tab_chat, server, "One?", "First.")
    converse(tab_chat, server, "Two?")
    tab_chat.button("One?").click()
    expect(tab_chat.answer).to_have_text("First.")


def test_a_browser_without_room_is_said_to_be_full(tab_chat: ChatPage, server: FakeServer) -> None:
    converse(tab_chat, server, "One?", "First.")
    tab_chat.page.evaluate(FULL)
    converse(tab_chat, server, "Two?")
    expect(tab_chat.page.get_by_text("The browser's storage is full")).to_be_visible()
    tab_chat.reload()
    expect(titles(tab_chat.page)).to_have_text(["One?"])


def test_a_chat_that_did_not_fit_is_kept_when_there_is_room(
    tab_chat: ChatPage, server: FakeServer
) -> None:
    page = tab_chat.page
    converse(tab_chat, server, "One?")
    page.evaluate("localStorage.setItem('fill', 'x'.repeat(5 * 1024 * 1024 - 5000))")
    converse(tab_chat, server, "Two?", "long " * 4_000)
    notice = page.get_by_text("The browser's storage is full")
    expect(notice).to_be_visible()
    page.evaluate("localStorage.removeItem('fill')")
    delete(tab_chat, "One?")
    expect(notice).to_be_hidden()
    page.reload()
    expect(titles(page)).to_have_text(["Two?"])


def test_what_somebody_else_wrote_is_no_chat_and_no_harm(
    chat: ChatPage, server: FakeServer
) -> None:
    converse(chat, server, "One?")
    wrong = ["", "null", "[]", '{"id": "2"}', json.dumps({"id": "4", "title": 1, "turns": []}), "{"]
    wrong += [json.dumps({"id": "6", "title": "x", "changedMs": 1, "turns": [{"question": "q"}]})]
    put = "(texts) => texts.forEach((t, i) => localStorage.setItem(`triolet.chat.${i}`, t))"
    chat.page.evaluate(put, wrong)
    chat.reload()
    expect(titles(chat.page)).to_have_text(["One?"])


def test_two_tabs_show_the_same_chats(browser: Browser, server: FakeServer) -> None:
    first = new_page(browser)
    with opened(first, server) as one:
        converse(one, server, "One?", "First.")
        second = first.context.new_page()
        second.goto(first.url)
        expect(second.locator(".answer .text")).to_have_text("First.")
        answered(one, server, "And?", "More.", tokens=2)
        expect(second.locator(".answer .text").last).to_have_text("More.")
        second.get_by_role("button", name="Delete One?").click()
        expect(titles(first)).to_have_count(0)
        second.close()
    first.context.close()


def test_the_list_is_bounded_and_the_oldest_gives_way(chat: ChatPage) -> None:
    kept, gone = chat.page.evaluate(
        """async () => {
          const { ChatStore, MAX_CHATS } = await import("/static/store.js");
          const store = new ChatStore(() => sessionStorage, () => {});
          const turns = [{question: "?", answer: null}];
          let gone = [];
          for (let n = 0; n < MAX_CHATS + 1; n += 1) {
            gone = store.save({id: String(n), title: "t", changedMs: n, turns});
          }
          const again = new ChatStore(() => sessionStorage, () => {});
          sessionStorage.clear();
          return [again.list().map(({id}) => Number(id)), gone];
        }"""
    )
    assert kept == list(range(100, 0, -1))
    assert gone == ["0"]


def test_the_drawer_of_a_phone_opens_and_closes_by_keys(chat: ChatPage, server: FakeServer) -> None:
    converse(chat, server, "One?")
    chat.page.set_viewport_size({"width": 360, "height": 640})
    expect(chat.button("One?")).to_be_hidden()
    opener = chat.page.locator("#open-chats")
    opener.focus()
    chat.page.keyboard.press("Enter")
    expect(chat.button("One?")).to_be_focused()
    expect(opener).to_have_attribute("aria-expanded", "true")
    chat.page.keyboard.press("Escape")
    expect(opener).to_be_focused()
    expect(chat.button("One?")).to_be_hidden()
    opener.click()
    chat.button("New chat").last.click()
    expect(chat.page.get_by_text("What would you like to ask?")).to_be_visible()
