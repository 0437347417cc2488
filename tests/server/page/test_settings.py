"""Tests of the chat page's settings: they are sent with each question and stored, but an API key
only for the tab."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

if TYPE_CHECKING:
    from .chat_page import ChatPage
    from .fake_server import FakeServer

pytestmark = pytest.mark.slow

WRONG_AND_RIGHT = (
    ("Temperature", "2.1", "0"),
    ("Top p", "0", "0.95"),
    ("Longest answer in tokens", "0.5", "16"),
    ("Seed", "-1", "0"),
    ("Stop at", "x" * 65, "x" * 64),
)


def test_choices_go_with_each_question_and_outlive_the_page(
    tab_chat: ChatPage, server: FakeServer
) -> None:
    page = tab_chat.page
    server.models.append("other")
    tab_chat.reload()
    tab_chat.button("Settings").click()
    dialog = page.get_by_role("dialog", name="Settings")
    dialog.get_by_label("Instructions").fill("Answer in rhyme.")
    dialog.get_by_label("Temperature").fill("0.5")
    dialog.get_by_label("Longest answer in tokens").fill("7")
    dialog.get_by_label("Seed").fill("11")
    dialog.get_by_label("Stop at").fill("END\n\\n\\n")
    dialog.get_by_label("Model", exact=True).select_option("other")
    tab_chat.button("Done").click()
    expect(tab_chat.button("Settings")).to_be_focused()
    tab_chat.ask("Hello")
    first = server.next_exchange()
    chosen = {"instructions": "Answer in rhyme.", "temperature": 0.5, "max_output_tokens": 7}
    chosen |= {"seed": 11, "stop": ["END", "\n\n"], "model": "other"}
    assert {name: first.request.get(name) for name in (*chosen, "top_p")} == chosen | {
        "top_p": None
    }
    first.created().say("Hi").complete(1)
    expect(tab_chat.button("Send")).to_be_visible()  # or the page would resume it
    tab_chat.reload()
    tab_chat.ask("Again")
    second = server.next_exchange()
    assert chosen.items() <= second.request.items()
    second.created().say("Hi").complete(1)
    tab_chat.button("Settings").click()
    tab_chat.button("Reset to the model's defaults").click()
    page.keyboard.press("Escape")
    tab_chat.ask("Plain")
    third = server.next_exchange()
    assert not (chosen.keys() - {"model"}) & third.request.keys()
    assert third.request["model"] == server.models[0]
    third.created().say("Hi").complete(1)


def test_what_the_server_would_refuse_is_said_and_never_sent(
    chat: ChatPage, server: FakeServer
) -> None:
    chat.button("Settings").click()
    for label, wrong, right in WRONG_AND_RIGHT:
        field = chat.page.get_by_label(label)
        said = chat.page.locator(f"#{field.get_attribute('id')}-problem")
        field.fill(wrong)
        expect(said).not_to_be_empty()
        chat.button("Done").click()
        expect(field).to_be_focused()
        field.fill(right)
        expect(said).to_be_empty()
    for label, wrong, _ in WRONG_AND_RIGHT:
        chat.page.get_by_label(label).fill(wrong)
    chat.page.keyboard.press("Escape")
    chat.ask("Hello")
    exchange = server.next_exchange()
    names = {"temperature", "top_p", "max_output_tokens", "seed", "stop"}
    assert not names & exchange.request.keys()
    exchange.created().say("Hi").complete(1)


def test_a_key_is_offered_and_forgotten_with_the_tab(tab_chat: ChatPage) -> None:
    page = tab_chat.page
    tab_chat.button("Settings").click()
    page.get_by_label("API key").fill("sk-clé")
    tab_chat.button("Done").click()
    offered = page.evaluate(
        """async () => (await import("/static/keys.js")).keyProtocols("sk-clé")"""
    )
    word = base64.urlsafe_b64encode("sk-clé".encode()).decode().rstrip("=")
    assert offered == ["triolet", f"triolet-key.{word}"]
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
    local, _, session = kept.partition("}, {") if "}, {" in kept else kept.partition("},{")
    assert "sk-cl" not in local
    assert "sk-cl" in session


def test_a_refused_key_is_told_as_such_and_where_to_enter_another(
    own_chat: ChatPage, server: FakeServer
) -> None:
    page = own_chat.page
    own_chat.complaints.allow("401", "WebSocket connection")
    own_chat.button("Settings").click()
    page.get_by_label("API key").fill("sk-wrong")
    own_chat.button("Done").click()
    own_chat.stop_clock()
    server.wants_key = True
    server.drop()
    expect(own_chat.link).not_to_have_text("Connected")  # only now is there a back-off to pass
    page.clock.fast_forward(10_000)
    dialog = page.get_by_role("dialog", name="Settings")
    expect(dialog.get_by_role("alert")).to_contain_text("refuses the API key")
    strip = page.locator("#offline")
    expect(strip).to_contain_text("This server refuses the API key")
    expect(strip).to_contain_text("in the settings")
    expect(strip).not_to_contain_text("No connection")
    expect(own_chat.link).to_have_text("Needs a key")

    page.keyboard.press("Escape")
    with page.expect_response("**/v1/models"):
        page.clock.fast_forward(10_000)
    own_chat.ask("Hello?")
    expect(own_chat.problem).to_contain_text("The server refuses the API key.")
    expect(own_chat.problem).to_contain_text("settings")
    expect(dialog).to_be_hidden()

    own_chat.button("Enter a key").click()
    server.wants_key = False
    expect(page.get_by_label("API key")).to_be_focused()
    page.get_by_label("API key").fill("sk-right")
    own_chat.button("Done").click()  # connects at once: time that passed would end the try
    expect(own_chat.link).to_have_text("Connected")
    expect(strip).to_be_hidden()


def test_the_key_comes_first_where_the_server_asks_for_one(
    tab_chat: ChatPage, server: FakeServer
) -> None:
    page = tab_chat.page
    tab_chat.complaints.allow("401", "WebSocket connection")
    server.wants_key = True
    server.drop()
    dialog = page.get_by_role("dialog", name="Settings")
    expect(dialog.get_by_role("alert")).to_contain_text("This server needs an API key.")
    first = dialog.locator("input, select, textarea").first
    expect(first).to_be_focused()
    expect(first).to_have_attribute("id", "set-key")
    first.fill("sk-wrong")
    tab_chat.button("Done").click()
    expect(dialog.get_by_role("alert")).to_contain_text("refuses the API key below")
    server.wants_key = False
    first.fill("sk-right")
    tab_chat.button("Done").click()
    expect(tab_chat.link).to_have_text("Connected")
    tab_chat.button("Settings").click()
    expect(first).to_have_attribute("id", "set-model")
