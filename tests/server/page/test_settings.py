"""What the reader chooses for all answers: sent, kept, and never where it should not be."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

if TYPE_CHECKING:
    from .chat_page import ChatPage
    from .fake_server import FakeServer

pytestmark = pytest.mark.slow


def test_choices_go_with_each_question_and_outlive_the_page(
    own_chat: ChatPage, server: FakeServer
) -> None:
    page = own_chat.page
    own_chat.button("Settings").click()
    dialog = page.get_by_role("dialog", name="Settings")
    dialog.get_by_label("Instructions").fill("Answer in rhyme.")
    dialog.get_by_label("Temperature").fill("0.5")
    dialog.get_by_label("Longest answer, tokens").fill("7")
    dialog.get_by_label("Top p").fill("9")  # no such probability: as if it were empty
    own_chat.button("Done").click()
    expect(own_chat.button("Settings")).to_be_focused()
    own_chat.ask("Hello")
    first = server.next_exchange()
    chosen = {"instructions": "Answer in rhyme.", "temperature": 0.5, "max_output_tokens": 7}
    assert {name: first.request.get(name) for name in (*chosen, "top_p")} == chosen | {
        "top_p": None
    }
    first.created().say("Hi").complete(1)
    page.reload()
    expect(own_chat.link).to_have_text("Connected")
    own_chat.ask("Again")
    second = server.next_exchange()
    assert second.request["instructions"] == "Answer in rhyme."
    second.created().say("Hi").complete(1)
    own_chat.button("Settings").click()
    own_chat.button("Back to the model's own").click()
    page.keyboard.press("Escape")
    own_chat.ask("Plain")
    third = server.next_exchange()
    assert not {"instructions", "temperature", "max_output_tokens"} & set(third.request)
    third.created().say("Hi").complete(1)


def test_a_key_is_offered_and_forgotten_with_the_tab(own_chat: ChatPage) -> None:
    page = own_chat.page
    own_chat.button("Settings").click()
    page.get_by_label("API key").fill("sk-clé")
    own_chat.button("Done").click()
    offered = page.evaluate(
        """async () => (await import("/static/settings.js")).keyProtocols("sk-clé")"""
    )
    word = base64.urlsafe_b64encode("sk-clé".encode()).decode().rstrip("=")
    assert offered == ["triolet", f"triolet-key.{word}"]
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
    local, _, session = kept.partition("}, {") if "}, {" in kept else kept.partition("},{")
    assert "sk-cl" not in local
    assert "sk-cl" in session


MARKDOWN = """# A story

It has *one* hero, **two** foes and `code`:

- first
- second

3. third
4. fourth

> a quote

```python
if 1 < 2: print("*no emphasis*")
```
See [the site](https://example.org/x) and [not this](javascript:alert(1)).
<img src=x onerror=alert(1)><script>alert(1)</script>"""


def test_an_answer_is_shown_with_its_form_and_runs_nothing(
    chat: ChatPage, server: FakeServer
) -> None:
    chat.ask("Show me")
    server.next_exchange().created().say(*MARKDOWN.splitlines(keepends=True)).complete(9)
    answer = chat.answer
    expect(answer.get_by_role("heading", name="A story")).to_be_visible()
    expect(answer.locator("em")).to_have_text("one")
    expect(answer.locator("strong")).to_have_text("two")
    expect(answer.locator("p code")).to_have_text("code")
    expect(answer.locator("ul li")).to_have_text(["first", "second"])
    expect(answer.locator("ol[start='3'] li")).to_have_text(["third", "fourth"])
    expect(answer.locator("blockquote")).to_have_text("a quote")
    expect(answer.locator("pre")).to_have_text('if 1 < 2: print("*no emphasis*")')
    expect(answer.locator("a")).to_have_count(1)
    expect(answer.locator("a")).to_have_attribute("rel", "noopener noreferrer nofollow")
    expect(answer.locator("img, script")).to_have_count(0)
    expect(answer).to_contain_text("<img src=x onerror=alert(1)>")
    expect(answer).to_contain_text("[not this](javascript:alert(1))")


def test_a_text_without_form_stays_as_it_was_written(chat: ChatPage, server: FakeServer) -> None:
    chat.ask("Plainly")
    server.next_exchange().created().say("one\n", "two  three").complete(3)
    expect(chat.facts).to_contain_text("3 tokens")
    assert chat.answer.evaluate("node => node.textContent") == "one\ntwo  three"
    expect(chat.answer.locator("*")).to_have_count(0)


@pytest.mark.parametrize("piece", ["*", "**a", "`", "[a](", "[", "> ", "# ", "```\n", "1. ", "- *"])
def test_no_text_takes_the_page_long(chat: ChatPage, piece: str) -> None:
    """A pattern that tries twice would never come back, and the test would meet its deadline."""
    made = chat.page.evaluate(
        """async (text) => {
          const { renderMarkdown } = await import("/static/markdown.js");
          return renderMarkdown(text).textContent.length;
        }""",
        piece * 20_000,
    )
    assert made <= len(piece) * 20_000
