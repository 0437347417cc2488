"""Test helper that drives the chat page as a user does: by roles and names, not by how it is
built."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from tests.chromium import Complaints

    from .fake_server import Exchange, FakeServer
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class ChatPage:
    """An open page and what is on it."""

    page: Page
    complaints: Complaints

    @property
    def field(self) -> Locator:
        return self.page.get_by_role("textbox", name="Your question")

    @property
    def link(self) -> Locator:
        return self.page.locator("#link")

    @property
    def answer(self) -> Locator:
        """The last answer's text."""
        return self.page.locator(".answer .text").last

    @property
    def facts(self) -> Locator:
        """The last answer's figures."""
        return self.page.locator(".facts").last

    @property
    def problem(self) -> Locator:
        return self.page.get_by_role("alert")

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def ask(self, question: str) -> None:
        """Type a question and send it with Enter."""
        self.field.fill(question)
        self.field.press("Enter")

    def reload(self) -> None:
        """Load the page again, and wait until it is connected."""
        self.page.reload()
        expect(self.link).to_have_text("Connected")

    def stop_clock(self) -> None:
        """Let the page's time pass only when told: on a busy machine it would otherwise reconnect,
        or take back what it shows for a moment, before the test has looked. Far in the future: a
        clock that runs can be stopped there only."""
        self.page.clock.install()
        self.page.clock.pause_at(time.time() + HOUR_S)

    def round_trip(self) -> None:
        """Let the server hear what the page has sent, and the page show what it was told."""
        self.page.evaluate(
            """async () => {
              await (await fetch("/v1/models")).text();
              await new Promise((shown) => requestAnimationFrame(() => setTimeout(shown)));
            }"""
        )


def begun(chat: ChatPage, server: FakeServer, question: str, *pieces: str) -> Exchange:
    """Ask, let the answer begin so, and wait until that is shown."""
    chat.ask(question)
    exchange = server.next_exchange().created().say(*pieces)
    expect(chat.answer).to_have_text("".join(pieces))
    return exchange


def answered(chat: ChatPage, server: FakeServer, question: str, *pieces: str, tokens: int) -> None:
    """Ask, let the whole answer be this, and wait until it is over."""
    chat.ask(question)
    server.next_exchange().created().say(*pieces).complete(tokens)
    expect(chat.button("Send")).to_be_visible()
    expect(chat.button("Regenerate")).to_be_visible()


def go_away(chat: ChatPage, server: FakeServer) -> None:
    """Stop the server, and wait until the page has noticed."""
    server.stop()
    expect(chat.link).to_have_text("Reconnecting")


def cut(chat: ChatPage, server: FakeServer) -> None:
    """Cut the connection, and wait until the page has noticed."""
    server.drop()
    expect(chat.link).to_have_text("Reconnecting")
