"""Tests of the chat page's error messages: each explains the failure and never becomes markup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from .chat_page import answered

if TYPE_CHECKING:
    from .chat_page import ChatPage
    from .fake_server import FakeServer

pytestmark = pytest.mark.slow

MARKUP = (
    '<img src="/static/none.png" onerror="window.broken = 1"><script>window.broken = 1</script>'
)


def refused(chat: ChatPage, server: FakeServer, *refusal: Any, shown: str) -> None:  # noqa: ANN401
    """Ask, refuse the request, and wait until the page shows this text."""
    chat.ask("Hello!")
    server.next_exchange().refuse(*refusal)
    expect(chat.problem).to_contain_text(shown)


def test_an_error_is_explained_and_can_be_tried_again(chat: ChatPage, server: FakeServer) -> None:
    refused(
        chat, server, 503, "draining", "internal words", shown="The server is about to restart."
    )
    expect(chat.problem).not_to_contain_text("internal words")
    chat.button("Try again").click()
    server.next_exchange().created().say("Good day.").complete(3)
    expect(chat.answer).to_have_text("Good day.")
    expect(chat.problem).to_be_hidden()


def test_a_chat_that_is_too_long_offers_a_new_one(chat: ChatPage, server: FakeServer) -> None:
    refused(
        chat,
        server,
        400,
        "context_length_exceeded",
        "2049 of 2048 tokens",
        shown="too long for the model",
    )
    chat.button("Start a new chat").click()
    expect(chat.page.locator(".turn")).to_have_count(0)
    expect(chat.field).to_be_focused()


def test_what_nobody_can_mend_offers_no_button(chat: ChatPage, server: FakeServer) -> None:
    refused(chat, server, 429, "insufficient_quota", "used up", shown="The quota is used up.")
    expect(chat.problem.get_by_role("button")).to_have_count(0)


def test_a_response_that_fails_midway_keeps_what_was_said(
    chat: ChatPage, server: FakeServer
) -> None:
    chat.ask("Hello!")
    server.next_exchange().created().say("Good").fail("server_error", "a worker died", 5)
    expect(chat.problem).to_contain_text("Something went wrong on the server.")
    expect(chat.answer).to_have_text("Good")
    expect(chat.facts.locator(".tokens")).to_have_text("5 tokens")


def test_an_unanswered_question_is_left_out_of_the_next_input(
    chat: ChatPage, server: FakeServer
) -> None:
    chat.ask("Lost?")
    server.next_exchange().refuse(503, "overloaded", "full")
    expect(chat.problem).to_be_visible()
    chat.ask("Found?")
    assert server.next_exchange().messages == [("user", "Found?")]


def test_markup_stays_text_wherever_it_comes_from(chat: ChatPage, server: FakeServer) -> None:
    chat.ask(MARKUP)
    exchange = server.next_exchange()
    assert exchange.messages == [("user", MARKUP)]
    exchange.created().say(MARKUP[:20], MARKUP[20:]).complete(40)
    expect(chat.button("Send")).to_be_visible()
    expect(chat.answer).to_have_text(MARKUP)
    expect(chat.page.locator(".question .text").last).to_have_text(MARKUP)
    refused(chat, server, 400, MARKUP, MARKUP, shown=MARKUP)
    assert chat.page.locator("img, .turn script").count() == 0
    assert chat.page.evaluate("window.broken") is None


def test_line_breaks_and_spaces_survive(chat: ChatPage, server: FakeServer) -> None:
    answered(chat, server, "Hello!", "a\n\n", "   b", tokens=4)
    expect(chat.answer).to_contain_text("b")
    expect(chat.button("Send")).to_be_visible()
    assert chat.answer.inner_text() == "a\n\n   b"
