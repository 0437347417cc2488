"""Tests of a conversation in the chat page: asking, streaming, stopping, regenerating."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from .chat_page import answered, begun

if TYPE_CHECKING:
    from .chat_page import ChatPage
    from .fake_server import FakeServer

pytestmark = pytest.mark.slow

STORY = "Tell me a story."


def test_a_question_goes_out_as_the_official_client_would_send_it(
    chat: ChatPage, server: FakeServer
) -> None:
    chat.ask("  What is 12 + 30? ")
    assert server.next_exchange().request == {
        "type": "response.create",
        "stream_id": "answer-1",
        "model": server.models[0],
        "input": [{"type": "message", "role": "user", "content": "What is 12 + 30?"}],
        "store": False,
        "resumable": True,
    }


def test_text_appears_as_it_streams(chat: ChatPage, server: FakeServer) -> None:
    chat.ask(STORY)
    exchange = server.next_exchange().created()
    expect(chat.page.get_by_text("Waiting for the first token")).to_be_attached()
    exchange.say("Once ", "upon ")
    expect(chat.answer).to_have_text("Once upon ")
    exchange.say("a time.")
    expect(chat.answer).to_have_text("Once upon a time.")
    expect(chat.button("Stop the answer")).to_be_visible()
    exchange.complete(output_tokens=7)
    expect(chat.button("Send")).to_be_visible()
    expect(chat.answer).to_have_text("Once upon a time.")


def test_reasoning_is_folded_away_and_sent_with_the_conversation(
    chat: ChatPage, server: FakeServer
) -> None:
    reasoning = chat.page.locator(".reasoning").last
    thoughts = chat.page.locator(".thoughts").last
    chat.ask("Hello!")
    expect(reasoning).to_be_hidden()
    exchange = server.next_exchange().created().think("Shall ", "I <b>?")
    expect(reasoning).to_contain_text("Thinking…")
    expect(thoughts).to_have_text("Shall I <b>?")
    expect(thoughts).to_be_hidden()
    expect(chat.answer).to_have_text("")
    exchange.say("Good ")
    expect(chat.page.get_by_text("Reasoning")).to_be_visible()
    chat.page.get_by_text("Reasoning").click()
    expect(thoughts).to_be_visible()
    exchange.say("day.")
    expect(chat.answer).to_have_text("Good day.")
    expect(thoughts).to_be_visible()
    exchange.complete(9)
    expect(chat.button("Send")).to_be_visible()
    chat.reload()
    expect(thoughts).to_have_text("Shall I <b>?")
    chat.ask("Again.")
    assert server.next_exchange().request["input"] == [
        {"type": "message", "role": "user", "content": "Hello!"},
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Shall I <b>?"}],
        },
        {"type": "message", "role": "assistant", "content": "Good day."},
        {"type": "message", "role": "user", "content": "Again."},
    ]


def test_an_answer_says_how_fast_and_how_long_it_was(
    own_chat: ChatPage, server: FakeServer
) -> None:
    own_chat.page.clock.install()
    own_chat.ask(STORY)
    exchange = server.next_exchange().created().say("Once ")
    expect(own_chat.facts).to_contain_text(re.compile(r"TTFT\s*\d+ ms"))
    expect(own_chat.facts).to_contain_text("1 token")
    own_chat.page.clock.fast_forward(100)
    exchange.say("upon a time.")
    exchange.complete(output_tokens=1234)
    expect(own_chat.facts).to_contain_text("1,234 tokens")
    expect(own_chat.facts).to_contain_text(re.compile(r"[\d,.]+ tokens/s"))
    expect(own_chat.facts).to_contain_text(re.compile(r"Prompt\s*7, 3 cached"))
    expect(own_chat.facts).to_contain_text(re.compile(r"End\s*stop"))


def test_each_turn_sends_the_whole_conversation(chat: ChatPage, server: FakeServer) -> None:
    chat.ask("Hello!")
    exchange = server.next_exchange().created().say("Good day.")
    exchange.complete(3)
    expect(chat.button("Send")).to_be_visible()
    chat.ask("Spell it.")
    assert server.next_exchange().messages == [
        ("user", "Hello!"),
        ("assistant", "Good day."),
        ("user", "Spell it."),
    ]


def test_an_answer_cut_at_the_limit_says_so(chat: ChatPage, server: FakeServer) -> None:
    chat.ask(STORY)
    server.next_exchange().created().say("Once").incomplete(64, "max_output_tokens")
    expect(chat.facts).to_contain_text("Reached the length limit")


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stopping_cancels_at_the_server_and_keeps_the_text(
    chat: ChatPage, server: FakeServer, way: str
) -> None:
    exchange = begun(chat, server, STORY, "Once upon")
    if way == "button":
        chat.button("Stop the answer").click()
    else:
        chat.page.keyboard.press("Escape")
    exchange.wait_cancelled()
    expect(chat.facts).to_contain_text("Stopped")
    expect(chat.facts).to_contain_text("≥ 1 token")
    exchange.say(" too late").incomplete(5)
    expect(chat.facts).to_contain_text("5 tokens")
    expect(chat.answer).to_have_text("Once upon")


def test_what_still_comes_for_a_stopped_answer_stays_out_of_the_next(
    chat: ChatPage, server: FakeServer
) -> None:
    first = begun(chat, server, STORY, "Once upon")
    chat.page.keyboard.press("Escape")
    chat.ask("Another one.")
    second = server.next_exchange().created()
    assert second.messages[1] == ("assistant", "Once upon")
    second.say("There ")
    first.say(" a time").refuse(500, "server_error", "too late to matter")
    second.say("was").complete(3)
    expect(chat.answer).to_have_text("There was")
    expect(chat.problem).to_have_count(0)


def test_the_last_word_on_a_stopped_answer_does_not_replace_its_successor(
    chat: ChatPage, server: FakeServer
) -> None:
    first = begun(chat, server, STORY, "Once upon")
    chat.page.keyboard.press("Escape")
    chat.button("Regenerate").click()
    server.next_exchange().created().say("There was").complete(3)
    expect(chat.facts).to_contain_text("3 tokens")
    first.incomplete(5)
    chat.round_trip()
    assert chat.answer.inner_text() == "There was"
    expect(chat.facts).to_contain_text("3 tokens")


def test_a_stop_before_the_server_said_anything_cancels_too(
    chat: ChatPage, server: FakeServer
) -> None:
    chat.ask(STORY)
    exchange = server.next_exchange()
    chat.button("Stop the answer").click()
    expect(chat.facts).to_contain_text("Stopped")
    exchange.wait_cancelled()


def test_regenerating_replaces_the_last_answer(chat: ChatPage, server: FakeServer) -> None:
    chat.ask(STORY)
    first = server.next_exchange()
    first.created().say("A dull one.").complete(4)
    chat.button("Regenerate").click()
    second = server.next_exchange()
    assert second.messages == first.messages
    expect(chat.answer).to_have_text("")
    second.created().say("A better one.").complete(4)
    expect(chat.answer).to_have_text("A better one.")
    expect(chat.page.locator(".turn")).to_have_count(1)
    expect(chat.field).to_be_focused()


def test_only_the_last_answer_can_be_regenerated(chat: ChatPage, server: FakeServer) -> None:
    for question in ("One?", "Two?"):
        answered(chat, server, question, "Yes.", tokens=2)
    expect(chat.button("Copy")).to_have_count(2)
    expect(chat.button("Regenerate")).to_have_count(1)


def test_a_new_chat_begins_with_nothing_of_the_old_one(chat: ChatPage, server: FakeServer) -> None:
    exchange = begun(chat, server, STORY, "Once")
    chat.button("New chat").click()
    expect(chat.page.get_by_text("What would you like to ask?")).to_be_visible()
    expect(chat.field).to_be_focused()
    exchange.say(" upon")
    chat.ask("Hello!")
    assert server.next_exchange().messages == [("user", "Hello!")]
    expect(chat.page.get_by_text("Once")).to_have_count(0)


def test_the_last_question_can_be_asked_differently(chat: ChatPage, server: FakeServer) -> None:
    answered(chat, server, "Hello!", "Good day.", tokens=3)
    answered(chat, server, "Tell me a stroy.", "What?", tokens=2)
    expect(chat.button("Edit")).to_have_count(1)
    chat.button("Edit").click()
    expect(chat.field).to_have_value("Tell me a stroy.")
    expect(chat.field).to_be_focused()
    chat.page.keyboard.press("Escape")
    expect(chat.field).to_have_value("")
    chat.button("Edit").click()
    chat.ask(STORY)
    exchange = server.next_exchange()
    assert exchange.messages == [("user", "Hello!"), ("assistant", "Good day."), ("user", STORY)]
    exchange.created().say("Once upon a time.").complete(5)
    expect(chat.answer).to_have_text("Once upon a time.")
    expect(chat.page.locator(".question .text")).to_have_text(["Hello!", STORY])
    expect(chat.page.get_by_text("This replaces your last question")).to_be_hidden()


def test_a_suggestion_asks_its_question(chat: ChatPage, server: FakeServer) -> None:
    suggestion = chat.page.locator(".suggestion", has_text="What is the capital of France?")
    suggestion.click()
    assert server.next_exchange().messages == [("user", "What is the capital of France?")]
    expect(suggestion).to_be_hidden()
    expect(chat.field).to_be_focused()


def test_there_are_suggestions_for_what_the_demo_model_can_do(chat: ChatPage) -> None:
    expect(chat.page.locator("#lead")).to_contain_text("built-in demo model")
    offered = chat.page.locator(".suggestion").all_inner_texts()
    for hint in ("dragon", "12 + 30", "capital of France", "garden", "lamp", "Who are you"):
        assert any(hint in text for text in offered), hint


def test_a_model_without_words_of_its_own_gets_those_for_any_model(
    tab_chat: ChatPage, server: FakeServer
) -> None:
    expect(tab_chat.page.get_by_text("Spell the word garden.")).to_be_visible()
    server.models, server.page_words = ["other"], None
    server.drop()
    expect(tab_chat.page.locator("#model")).to_have_text("other")
    expect(tab_chat.page.get_by_text("Spell the word garden.")).to_have_count(0)
    expect(tab_chat.page.locator("#lead")).to_contain_text("One process computes your prompt")
    expect(tab_chat.page.locator(".suggestion").first).to_be_visible()
    expect(tab_chat.page.locator("#no-template")).to_be_hidden()


def test_a_model_without_a_chat_template_says_so_and_suggests_nothing(
    tab_chat: ChatPage, server: FakeServer
) -> None:
    server.page_words = {"lead": None, "cards": [], "has_chat_template": False}
    server.drop()
    expect(tab_chat.page.get_by_text("This model has no chat template")).to_be_visible()
    expect(tab_chat.page.locator(".suggestion").first).to_be_hidden()


def test_a_late_answer_of_the_server_before_names_no_model(
    tab_chat: ChatPage, server: FakeServer
) -> None:
    server.wait_for_question_about_models()
    expect(tab_chat.page.locator("#model")).to_have_text("triolet-demo")
    server.answers_handshakes.clear()
    server.drop()
    server.wait_for_question_about_models()  # whether a key is wanted: the page was cut off
    server.answers_models.clear()
    server.answers_handshakes.set()
    server.wait_for_question_about_models()
    server.answers_handshakes.clear()
    server.drop()
    expect(tab_chat.link).not_to_have_text("Connected")
    server.models, server.page_words = ["other"], None
    with tab_chat.page.expect_event("requestfinished", lambda one: one.url.endswith("/models")):
        server.answers_models.set()
    server.answers_handshakes.set()
    expect(tab_chat.page.locator("#model")).to_have_text("other")
    tab_chat.ask("Hello!")
    assert server.next_exchange().request["model"] == "other"


def test_an_answer_keeps_the_name_of_the_model_that_gave_it(
    tab_chat: ChatPage, server: FakeServer
) -> None:
    answered(tab_chat, server, "Hello!", "Good day.", tokens=3)
    speakers = tab_chat.page.locator(".answer .role")
    expect(speakers).to_have_text(["triolet-demo"])
    server.models = ["other"]
    server.drop()
    expect(tab_chat.page.locator("#model")).to_have_text("other")
    answered(tab_chat, server, "And you?", "Good evening.", tokens=3)
    expect(speakers).to_have_text(["triolet-demo", "other"])
    expect(tab_chat.button("Send")).to_be_visible()
    tab_chat.page.reload()
    expect(speakers).to_have_text(["triolet-demo", "other"])


def test_a_copied_answer_is_the_text_of_the_answer(own_chat: ChatPage, server: FakeServer) -> None:
    own_chat.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answered(own_chat, server, STORY, "Once\nupon <b>a</b> time.", tokens=8)
    expect(own_chat.button("Copy")).to_be_visible()
    own_chat.stop_clock()
    own_chat.button("Copy").click()
    expect(own_chat.button("Copied")).to_be_visible()
    copied = own_chat.page.evaluate("navigator.clipboard.readText()")
    assert copied == "Once\nupon <b>a</b> time."
