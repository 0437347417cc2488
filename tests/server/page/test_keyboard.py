"""Tests of the chat page with the keyboard alone and for screen readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from .chat_page import answered

if TYPE_CHECKING:
    from .chat_page import ChatPage
    from .fake_server import FakeServer

pytestmark = pytest.mark.slow


def test_a_whole_chat_needs_no_mouse(chat: ChatPage, server: FakeServer) -> None:
    keys = chat.page.keyboard
    expect(chat.field).to_be_focused()
    keys.type("Tell me a story.")
    keys.press("Enter")
    exchange = server.next_exchange().created().say("Once")
    expect(chat.answer).to_have_text("Once")
    expect(chat.field).to_be_focused()
    keys.press("Tab")
    expect(chat.button("Stop the answer")).to_be_focused()
    keys.press("Enter")
    exchange.wait_cancelled()
    exchange.incomplete(1)
    expect(chat.button("Regenerate")).to_be_visible()
    expect(chat.field).to_be_focused()
    keys.press("Shift+Tab")
    expect(chat.button("Regenerate")).to_be_focused()
    keys.press("Enter")
    server.next_exchange().created().say("Again").complete(1)
    expect(chat.answer).to_have_text("Again")
    expect(chat.field).to_be_focused()


def test_shift_enter_begins_a_new_line(chat: ChatPage, server: FakeServer) -> None:
    keys = chat.page.keyboard
    height = chat.field.bounding_box()
    keys.type("one")
    keys.press("Shift+Enter")
    keys.type("two")
    taller = chat.field.bounding_box()
    assert height is not None
    assert taller is not None
    assert taller["height"] > height["height"]
    keys.press("Enter")
    assert server.next_exchange().messages == [("user", "one\ntwo")]
    expect(chat.field).to_have_value("")


def test_enter_that_ends_a_composition_does_not_send(chat: ChatPage, server: FakeServer) -> None:
    chat.field.fill("にほん")
    chat.field.dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    expect(chat.field).to_have_value("にほん")
    chat.round_trip()
    assert server.is_quiet


def test_nothing_is_sent_for_an_empty_question(chat: ChatPage, server: FakeServer) -> None:
    expect(chat.button("Send")).to_be_disabled()
    chat.ask("  \n ")
    expect(chat.button("Send")).to_be_disabled()
    expect(chat.page.locator(".turn")).to_have_count(0)
    chat.round_trip()
    assert server.is_quiet


def test_a_question_typed_during_an_answer_is_kept(chat: ChatPage, server: FakeServer) -> None:
    chat.ask("Tell me a story.")
    exchange = server.next_exchange().created().say("Once")
    chat.ask("And another.")
    expect(chat.field).to_have_value("And another.")
    exchange.complete(1)
    expect(chat.button("Send")).to_be_visible()
    chat.field.press("Enter")
    assert server.next_exchange().messages[-1] == ("user", "And another.")


def test_escape_does_nothing_when_nothing_is_under_way(chat: ChatPage, server: FakeServer) -> None:
    answered(chat, server, "Hello!", "Good day.", tokens=3)
    chat.page.keyboard.press("Escape")
    expect(chat.facts).not_to_contain_text("Stopped")


def test_a_screen_reader_hears_the_whole_answer_once_it_is_there(
    chat: ChatPage, server: FakeServer
) -> None:
    announcer = chat.page.locator("#announcer")
    article = chat.page.get_by_role("article").last
    chat.ask("Hello!")
    exchange = server.next_exchange().created().say("Good ")
    expect(announcer).to_have_text("The model is answering.")
    expect(article).to_have_attribute("aria-busy", "true")
    exchange.say("day.")
    expect(chat.answer).to_have_text("Good day.")
    expect(announcer).to_have_text("The model is answering.")
    exchange.complete(3)
    expect(announcer).to_have_text("Good day.")
    expect(article).to_have_attribute("aria-busy", "false")


def test_roles_are_named(chat: ChatPage, server: FakeServer) -> None:
    answered(chat, server, "Hello!", "Good day.", tokens=3)
    expect(chat.page.get_by_role("heading", name="You")).to_be_attached()
    speaker = chat.page.get_by_role("log").get_by_role("heading", name=server.models[0])
    expect(speaker).to_be_visible()


def test_every_button_has_a_name(chat: ChatPage, server: FakeServer) -> None:
    answered(chat, server, "Hello!", "Good day.", tokens=3)
    for button in chat.page.get_by_role("button").all():
        label = button.get_attribute("aria-label") or button.inner_text()
        assert label.strip(), button.inner_html()
