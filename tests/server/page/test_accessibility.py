"""Tests of the accessibility of all pages in light and dark: names of controls, contrast, button
sizes, and Tab order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from .chat_page import answered
from .test_dashboard import status
from .test_markdown import STORY

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Page

    from .chat_page import ChatPage
    from .fake_server import FakeServer

pytestmark = pytest.mark.slow

LEAST_CONTRAST = 4.5  # WCAG 2.2 AA for text of ordinary size
LOOK = """(least) => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const bytes = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const over = ([r, g, b, a], under) =>
    [r, g, b].map((byte, n) => (byte * a + under[n] * (255 - a)) / 255);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((byte) => {
      const c = byte / 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      layers.unshift(bytes(getComputedStyle(at).backgroundColor));
    }
    return layers.reduce((under, layer) => over(layer, under), [255, 255, 255]);
  };
  const contrast = (element, pseudo) => {
    const below = ground(element);
    const ink = over(bytes(getComputedStyle(element, pseudo).color), below);
    const [lighter, darker] = [luminance(ink), luminance(below)].sort((a, b) => b - a);
    return (lighter + 0.05) / (darker + 0.05);
  };
  const dialog = document.querySelector("dialog[open]");
  const isThere = (element) =>
    element.checkVisibility({visibilityProperty: true, opacityProperty: true})
    && !element.closest("[inert], .unseen, :disabled, [aria-hidden=true]")
    && (!dialog || dialog.contains(element));
  const shown = [...document.body.querySelectorAll("*")].filter(isThere);
  const words = (element) => [...element.childNodes].some((node) =>
    node.nodeType === Node.TEXT_NODE && node.data.trim());
  const kinds = "a[href], button, input, select, textarea";
  const controls = shown.filter((element) => element.matches(kinds));
  const name = (element) => element.getAttribute("aria-label") || element.innerText.trim()
    || [...(element.labels ?? [])].map((label) => label.innerText.trim()).join(" ");
  const tell = (element) => element.outerHTML.slice(0, 120);
  const ids = [...document.querySelectorAll("[id]")].map(({id}) => id);
  const referring = ["for", "aria-labelledby", "aria-describedby", "aria-controls"];
  return {
    faint: [
      ...shown.filter(words).map((element) => [contrast(element), tell(element)]),
      ...shown.filter((element) => element.placeholder && !element.value)
        .map((element) => [contrast(element, "::placeholder"), tell(element)]),
    ].filter(([ratio]) => ratio < least),
    nameless: controls.filter((element) => !name(element)).map(tell),
    twice: ids.filter((id, place) => ids.indexOf(id) !== place),
    dangling: referring.flatMap((attribute) =>
      [...document.querySelectorAll(`[${attribute}]`)].flatMap((element) =>
        element.getAttribute(attribute).split(" ").filter((id) => !document.getElementById(id)))),
    small: controls.filter((element) => {
      const {width, height} = element.getBoundingClientRect();
      return element.matches("button") && (width < 24 || height < 24);
    }).map(tell),
    levels: shown.filter((element) => /^H[1-6]$/.test(element.tagName)).map(({tagName}) => tagName),
    landmarks: ["main", "header"].filter((part) => !document.querySelector(part)),
    language: document.documentElement.lang,
    title: document.title,
  };
}"""


def check(page: Page) -> None:
    """Check the page in its current state."""
    seen: dict[str, Any] = page.evaluate(LOOK, LEAST_CONTRAST)
    for what in ("faint", "nameless", "twice", "dangling", "small", "landmarks"):
        assert seen[what] == [], what
    assert seen["language"] == "en"
    assert "Triolet" in seen["title"]


def talk(chat: ChatPage, server: FakeServer) -> None:
    answered(chat, server, "Show me", STORY, tokens=9)
    chat.ask("And an error?")
    server.next_exchange().refuse(503, "overloaded", "full")
    expect(chat.problem).to_be_visible()


def as_it_opens(chat: ChatPage, server: FakeServer) -> None:
    """Leave the page as it opens."""


def with_settings(chat: ChatPage, server: FakeServer) -> None:
    chat.button("Settings").click()
    chat.page.get_by_label("Top p").fill("9")
    expect(chat.page.locator("#set-top_p-problem")).not_to_be_empty()


def with_a_drawer(chat: ChatPage, server: FakeServer) -> None:
    talk(chat, server)
    chat.page.set_viewport_size({"width": 360, "height": 640})
    chat.page.locator("#open-chats").click()
    expect(chat.button("Show me")).to_be_focused()


def with_an_undo(chat: ChatPage, server: FakeServer) -> None:
    talk(chat, server)
    chat.button("Delete Show me").click()
    expect(chat.button("Undo")).to_be_focused()


def on_the_dashboard(chat: ChatPage, server: FakeServer) -> None:
    server.status = status(1.0, [0, 0, 0, 0])
    chat.page.get_by_role("link", name="Dashboard").click()
    expect(chat.page.locator(".worker")).to_have_count(3)


@pytest.mark.parametrize(
    "way", [as_it_opens, talk, with_settings, with_a_drawer, with_an_undo, on_the_dashboard]
)
def test_everything_has_a_name_and_stands_out(
    chat: ChatPage,
    server: FakeServer,
    way: Callable[[ChatPage, FakeServer], None],
) -> None:
    chat.page.emulate_media(color_scheme="light", reduced_motion="reduce")
    way(chat, server)
    chat.page.mouse.move(0, 0)
    check(chat.page)
    chat.page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    check(chat.page)


def test_tab_leads_through_the_page_in_the_order_of_reading(
    chat: ChatPage, server: FakeServer
) -> None:
    answered(chat, server, "Hello!", "```\ncode\n```", tokens=3)
    chat.page.evaluate("document.activeElement.blur(); getSelection().removeAllRanges()")
    chat.page.locator(".brand").click()
    names = []
    for _ in range(14):
        chat.page.keyboard.press("Tab")
        names.append(
            chat.page.evaluate(
                """() => {
                  const {ariaLabel, innerText, id} = document.activeElement;
                  return ariaLabel || innerText.trim() || id;
                }"""
            )
        )
        if names[-1] == "question":
            break
    assert names == [
        *("Dashboard", "Settings", "Dark theme"),
        *("New chat", "Hello!", "Rename Hello!", "Delete Hello!", "Delete all"),
        *("Edit", "Copy code", "Code", "Copy", "Regenerate", "question"),
    ]
