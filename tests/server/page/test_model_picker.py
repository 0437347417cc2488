"""Tests of the chat page's model picker: with several models, each chat keeps the one selected for
it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from .test_accessibility import check

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from .chat_page import ChatPage
    from .fake_server import FakeServer

pytestmark = pytest.mark.slow


def picker(chat: ChatPage) -> Locator:
    return chat.page.get_by_role("combobox", name="Model of this chat")


def ask(chat: ChatPage, server: FakeServer, question: str) -> str:
    """Ask, answer, and return the model that was asked."""
    chat.ask(question)
    exchange = server.next_exchange()
    exchange.created().say("Hi").complete(1)
    expect(chat.button("Send")).to_be_visible()
    model: str = exchange.request["model"]
    return model


def test_one_model_leaves_nothing_to_pick(chat: ChatPage, server: FakeServer) -> None:
    expect(chat.page.locator("#model")).to_have_text(server.models[0])
    expect(picker(chat)).to_be_hidden()


def test_names_of_one_model_are_no_choice(tab_chat: ChatPage, server: FakeServer) -> None:
    server.models.append("alias")
    server.roots["alias"] = server.models[0]
    tab_chat.page.reload()
    expect(tab_chat.page.locator("#model")).to_have_text(server.models[0])
    expect(picker(tab_chat)).to_be_hidden()


def test_each_chat_keeps_its_model(tab_chat: ChatPage, server: FakeServer) -> None:
    page, first = tab_chat.page, server.models[0]
    server.models.append("other")
    page.reload()
    expect(picker(tab_chat)).to_have_value(first)
    assert ask(tab_chat, server, "To the first") == first
    tab_chat.button("New chat").first.click()
    picker(tab_chat).select_option("other")
    assert ask(tab_chat, server, "To the other") == "other"
    expect(page.locator(".answer .role")).to_have_text(["other"])
    address = page.url
    tab_chat.button("New chat").first.click()
    expect(picker(tab_chat)).to_have_value(first)
    page.goto(address)
    tab_chat.reload()
    expect(picker(tab_chat)).to_have_value("other")
    assert ask(tab_chat, server, "Again") == "other"
    picker(tab_chat).select_option(first)
    assert ask(tab_chat, server, "And you?") == first


def test_a_picked_model_that_is_gone_gives_way(tab_chat: ChatPage, server: FakeServer) -> None:
    server.models.extend(["other", "third"])
    tab_chat.page.reload()
    picker(tab_chat).select_option("other")
    assert ask(tab_chat, server, "Hello") == "other"
    server.models.remove("other")
    server.drop()
    expect(picker(tab_chat)).to_have_value(server.models[0])
    assert ask(tab_chat, server, "Still there?") == server.models[0]


@pytest.mark.parametrize("width", [320, 1200])
def test_the_picker_fits_and_is_named(tab_chat: ChatPage, server: FakeServer, width: int) -> None:
    server.models.append("a-model-with-the-longest-name-that-a-settings-file-takes-v1.23.4")
    tab_chat.page.set_viewport_size({"width": width, "height": 640})
    tab_chat.page.reload()
    picker(tab_chat).select_option(server.models[1])
    expect(picker(tab_chat)).to_have_value(server.models[1])
    check(tab_chat.page)
    wide = "[document.documentElement, scroller].some((e) => e.scrollWidth > e.clientWidth)"
    assert not tab_chat.page.evaluate(wide)
