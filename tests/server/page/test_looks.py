"""Tests of the chat page's appearance: light and dark themes, phones, scrolling, and that it loads
nothing from elsewhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from .chat_page import answered
from .fake_server import STATIC

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from .chat_page import ChatPage
    from .fake_server import FakeServer

slow = pytest.mark.slow

PAPER = "getComputedStyle(document.body).backgroundColor"
LEAST_CONTRAST = 4.5  # WCAG 2.2 AA for text of ordinary size
CONTRAST = """(pairs) => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const luminance = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((byte) => {
      const c = byte / 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const probe = document.body.appendChild(document.createElement("i"));
  const shown = (name) => {
    probe.style.color = `var(--${name})`;
    return luminance(getComputedStyle(probe).color);
  };
  return pairs.map(([ink, ground]) => {
    const [lighter, darker] = [shown(ink), shown(ground)].sort((a, b) => b - a);
    return (lighter + 0.05) / (darker + 0.05);
  });
}"""
INKS_ON_GROUNDS = [
    [ink, ground]
    for ground, inks in {
        "paper": ("ink", "soft", "voice", "wait"),
        "raised": ("ink", "soft", "voice"),
        "tint": ("ink",),
        "bad-tint": ("ink", "bad"),
        "voice": ("on-voice",),
    }.items()
    for ink in inks
]


def brightness(chat: ChatPage) -> int:
    """Return the mean of the background's red, green and blue."""
    red, green, blue = map(int, re.findall(r"\d+", chat.page.evaluate(PAPER))[:3])
    return (red + green + blue) // 3


@slow
def test_the_page_follows_the_system_until_the_reader_chooses(chat: ChatPage) -> None:
    assert brightness(chat) > 200
    chat.page.emulate_media(color_scheme="dark")
    assert brightness(chat) < 60
    chat.button("Light theme").click()
    assert brightness(chat) > 200
    chat.page.reload()
    assert brightness(chat) > 200
    chat.button("Dark theme").click()
    chat.page.emulate_media(color_scheme="light")
    chat.page.reload()
    assert brightness(chat) < 60


@slow
def test_the_theme_needs_no_storage(tab_chat: ChatPage) -> None:
    forbid = "Object.defineProperty(window, 'localStorage', {get() { throw new Error('no'); }})"
    tab_chat.page.add_init_script(forbid)
    tab_chat.page.reload()
    tab_chat.button("Dark theme").click()
    assert brightness(tab_chat) < 60


@slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(chat: ChatPage, scheme: str) -> None:
    chat.page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    ratios = chat.page.evaluate(CONTRAST, INKS_ON_GROUNDS)
    too_faint = [
        (*pair, round(ratio, 2))
        for pair, ratio in zip(INKS_ON_GROUNDS, ratios, strict=True)
        if ratio < LEAST_CONTRAST
    ]
    assert not too_faint


@slow
def test_nothing_is_wider_than_a_small_phone(chat: ChatPage, server: FakeServer) -> None:
    chat.page.set_viewport_size({"width": 360, "height": 640})
    wide = "[document.documentElement, scroller].some((e) => e.scrollWidth > e.clientWidth)"
    assert not chat.page.evaluate(wide)
    answered(chat, server, "x" * 300, "y" * 300 + " ", "word " * 80, tokens=99)
    assert not chat.page.evaluate(wide)
    chat.ask("And an error?")
    server.next_exchange().refuse(400, "new", "z" * 300)
    expect(chat.problem).to_be_visible()
    assert not chat.page.evaluate(wide)
    expect(chat.link).to_have_text("Connected")


@slow
def test_reading_follows_the_end_unless_the_reader_scrolled_away(
    chat: ChatPage, server: FakeServer
) -> None:
    at_end = "scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 2"
    chat.ask("Tell me a story.")
    exchange = server.next_exchange().created().say("line\n" * 60)
    # Before it is there, the end is in sight too.
    expect(chat.answer).to_contain_text("line")
    chat.page.wait_for_function(at_end)
    expect(chat.button("Latest")).to_be_hidden()
    chat.page.locator("#scroller").hover()
    chat.page.mouse.wheel(0, -600)
    expect(chat.button("Latest")).to_be_visible()
    exchange.say("line\n" * 20, "end")
    expect(chat.answer).to_contain_text("end")
    assert not chat.page.evaluate(at_end)
    chat.button("Latest").click()
    chat.page.wait_for_function(at_end)
    expect(chat.button("Latest")).to_be_hidden()
    exchange.say("\nmore" * 20).complete(99)
    expect(chat.button("Regenerate")).to_be_visible()
    chat.page.wait_for_function(at_end)


@slow
def test_the_end_stays_in_sight_when_a_phones_keyboard_opens(
    chat: ChatPage, server: FakeServer
) -> None:
    answered(chat, server, "Tell me a story.", "line\n" * 60, tokens=99)
    expect(chat.button("Regenerate")).to_be_in_viewport()
    chat.page.set_viewport_size({"width": 360, "height": 320})
    expect(chat.button("Regenerate")).to_be_in_viewport()


@slow
def test_a_phone_keeps_its_keyboard_closed_over_the_answer(
    browser: Browser, server: FakeServer
) -> None:
    phone = browser.new_page(viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    phone.goto(server.url)
    field = phone.get_by_role("textbox", name="Your question")
    field.fill("Tell me a story.")
    phone.get_by_role("button", name="Send").tap()
    server.next_exchange()
    expect(field).not_to_be_focused()
    phone.close()


def test_files_load_nothing_from_elsewhere_and_make_no_markup() -> None:
    forbidden = re.compile(
        r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|outerHTML|insertAdjacent|document\.write"
        r"|\beval\(|new Function|style=|\son\w+=\"|@import"
    )
    files = [path for path in STATIC.iterdir() if path.is_file()]
    wrong = {
        path.name: found
        for path in files
        if (found := forbidden.findall(path.read_text(encoding="utf-8")))
    }
    assert not wrong
    assert {path.suffix for path in files} == {".html", ".css", ".js", ".svg"}


def test_every_module_is_preloaded() -> None:
    pages = sorted(STATIC.glob("*.html"))
    named = [set(re.findall(r'/static/([\w.]+)"', p.read_text(encoding="utf-8"))) for p in pages]
    own = {path.name for path in STATIC.iterdir() if path.is_file()}
    assert set().union(*named) == own - {p.name for p in pages}
    for page, files in zip(pages, named, strict=True):
        needed = {name for file in files for name in imports_of(file)}
        assert needed <= files, page.name


def imports_of(file: str) -> set[str]:
    """Return what a module imports, by name."""
    return set(re.findall(r'from "\./([\w.]+)"', (STATIC / file).read_text(encoding="utf-8")))
