"""Tests of the chat page when its connection breaks or the server restarts: it reconnects and
continues its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from .chat_page import begun, cut, go_away

if TYPE_CHECKING:
    from .chat_page import ChatPage
    from .fake_server import FakeServer

pytestmark = pytest.mark.slow

AWAY = ("WebSocket connection to", "net::ERR_CONNECTION")
"""How Chromium reports a server that is not there, whatever the page does about it."""


def test_an_answer_goes_on_when_its_connection_is_replaced(
    chat: ChatPage, server: FakeServer
) -> None:
    begun(chat, server, "Tell me a story.", "Once", " upon")
    server.drop()
    resumed = server.next_exchange()
    assert resumed.request == {
        "type": "response.resume",
        "response_id": "resp_answer-1",
        "stream_id": "answer-1",
        "sequence_number": 2,
    }
    resumed.say(" a time.").complete(5)
    expect(chat.answer).to_have_text("Once upon a time.")
    expect(chat.facts).to_contain_text("5 tokens")
    expect(chat.facts).not_to_contain_text("Connection lost")
    expect(chat.problem).to_have_count(0)


def test_an_answer_that_the_server_does_not_have_any_more_can_be_tried_again(
    chat: ChatPage, server: FakeServer
) -> None:
    begun(chat, server, "Tell me a story.", "Once upon")
    server.drop()
    server.next_exchange().refuse(404, "not_found", "there is no such response")
    expect(chat.problem).to_contain_text("The connection broke")
    expect(chat.answer).to_have_text("Once upon")
    chat.button("Try again").click()
    server.next_exchange().created().say("Once upon a time.").complete(5)
    expect(chat.answer).to_have_text("Once upon a time.")
    expect(chat.link).to_have_text("Connected")


def test_an_answer_stopped_without_a_connection_is_cancelled_when_there_is_one(
    chat: ChatPage, server: FakeServer
) -> None:
    begun(chat, server, "Tell me a story.", "Once")
    server.stop()
    expect(chat.facts).to_contain_text("Connection lost; continues after reconnecting")
    chat.page.keyboard.press("Escape")
    expect(chat.facts).to_contain_text("Stopped")
    server.start()
    resumed = server.next_exchange()
    resumed.wait_cancelled()
    resumed.incomplete(4)
    expect(chat.facts).to_contain_text("4 tokens")
    chat.complaints.allow(*AWAY)


def test_where_no_more_answers_are_kept_one_is_asked_for_that_is_not(
    chat: ChatPage, server: FakeServer
) -> None:
    chat.ask("Hello!")
    first = server.next_exchange()
    first.refuse(503, "overloaded", "64 are under way", param="resumable")
    second = server.next_exchange()
    assert (first.request["resumable"], second.request["resumable"]) == (True, False)
    second.created().say("Good day.").complete(3)
    expect(chat.answer).to_have_text("Good day.")
    expect(chat.problem).to_have_count(0)


def test_a_server_that_leaves_is_left_when_its_answers_are_over(
    chat: ChatPage, server: FakeServer
) -> None:
    chat.ask("Hello!")
    exchange = server.next_exchange().created().say("Good")
    exchange.say_raw('{"type": "notice", "code": "draining"}')
    exchange.say(" day.")
    expect(chat.answer).to_have_text("Good day.")
    exchange.complete(3)
    exchange.wait_connection_closed()
    expect(chat.link).to_have_text("Connected")
    begun(chat, server, "Still there?", "Yes.").complete(2)


def test_the_page_finds_a_restarted_server_and_its_new_model(
    chat: ChatPage, server: FakeServer
) -> None:
    expect(chat.page.locator("#model")).to_have_text("triolet-demo")
    go_away(chat, server)
    expect(chat.page.get_by_text("No connection to the server.")).to_be_visible()
    server.models = ["another-model"]
    server.start()
    expect(chat.link).to_have_text("Connected")
    expect(chat.page.get_by_text("No connection to the server.")).to_be_hidden()
    expect(chat.page.locator("#model")).to_have_text("another-model")
    chat.ask("Hello!")
    assert server.next_exchange().request["model"] == "another-model"
    chat.complaints.allow(*AWAY)


def test_try_now_does_not_wait_for_the_back_off(own_chat: ChatPage, server: FakeServer) -> None:
    own_chat.stop_clock()
    go_away(own_chat, server)
    for _ in range(6):
        own_chat.page.clock.fast_forward(10_000)
        expect(own_chat.link).to_have_text("Reconnecting")
    server.start()
    own_chat.button("Try now").click()
    expect(own_chat.link).to_have_text("Connected")
    own_chat.complaints.allow(*AWAY)


def test_a_question_asked_while_the_server_is_away_is_answered_when_it_is_back(
    chat: ChatPage, server: FakeServer
) -> None:
    go_away(chat, server)
    chat.ask("Are you there?")
    expect(chat.button("Stop the answer")).to_be_visible()
    server.start()
    server.next_exchange().created().say("Yes.").complete(2)
    expect(chat.answer).to_have_text("Yes.")
    chat.complaints.allow(*AWAY)


def test_a_question_does_not_wait_for_ever_for_a_server(
    own_chat: ChatPage, server: FakeServer
) -> None:
    own_chat.page.clock.install()
    go_away(own_chat, server)
    own_chat.ask("Are you there?")
    expect(own_chat.button("Stop the answer")).to_be_visible()
    own_chat.page.clock.fast_forward(10_000)
    expect(own_chat.problem).to_contain_text("The server cannot be reached.")
    own_chat.complaints.allow(*AWAY)


def test_a_question_that_waits_for_a_server_can_be_stopped(
    chat: ChatPage, server: FakeServer
) -> None:
    go_away(chat, server)
    chat.ask("Are you there?")
    chat.page.keyboard.press("Escape")
    expect(chat.facts).to_contain_text("Stopped")
    server.start()
    expect(chat.link).to_have_text("Connected")
    chat.ask("And now?")
    assert server.next_exchange().messages == [("user", "And now?")]
    chat.complaints.allow(*AWAY)


def test_a_message_that_the_server_finds_too_big_counts_as_too_long(
    chat: ChatPage, server: FakeServer
) -> None:
    chat.ask("Hello!")
    server.next_exchange().close(1009)
    expect(chat.problem).to_contain_text("too long for the model")


def test_a_server_that_does_not_speak_json_is_left(chat: ChatPage, server: FakeServer) -> None:
    chat.ask("Hello!")
    exchange = server.next_exchange()
    exchange.say_raw("<html>")
    exchange.wait_connection_closed()
    expect(chat.problem).to_contain_text("The connection broke")
    expect(chat.link).to_have_text("Connected")


def test_an_event_that_the_page_does_not_know_changes_nothing(
    chat: ChatPage, server: FakeServer
) -> None:
    chat.ask("Hello!")
    exchange = server.next_exchange().created()
    exchange.say_raw('{"type": "response.of_tomorrow", "response": {}}')
    exchange.say("Good day.").complete(3)
    expect(chat.answer).to_have_text("Good day.")


def test_a_connection_that_nobody_answers_is_given_up(
    own_chat: ChatPage, server: FakeServer
) -> None:
    own_chat.stop_clock()
    server.answers_handshakes.clear()
    cut(own_chat, server)
    own_chat.page.clock.fast_forward(1_000)
    expect(own_chat.link).to_have_text("Connecting")
    own_chat.page.clock.fast_forward(8_000)
    expect(own_chat.link).to_have_text("Reconnecting")
    server.answers_handshakes.set()
    own_chat.page.clock.fast_forward(10_000)
    expect(own_chat.link).to_have_text("Connected")
    own_chat.complaints.allow(*AWAY)


def test_connections_that_do_not_last_are_tried_ever_more_rarely(
    own_chat: ChatPage, server: FakeServer
) -> None:
    clock = own_chat.page.clock
    own_chat.stop_clock()
    for _ in range(6):
        cut(own_chat, server)
        clock.fast_forward(10_000)
        expect(own_chat.link).to_have_text("Connected")
    cut(own_chat, server)
    clock.fast_forward(2_000)
    expect(own_chat.link).to_have_text("Reconnecting")
    clock.fast_forward(8_000)
    expect(own_chat.link).to_have_text("Connected")
    clock.fast_forward(5_000)
    cut(own_chat, server)
    clock.fast_forward(400)
    expect(own_chat.link).to_have_text("Connected")
