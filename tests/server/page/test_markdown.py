"""Tests of Markdown in the chat page: answers are formatted, and hostile text stays text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from .chat_page import answered, begun

if TYPE_CHECKING:
    from .chat_page import ChatPage
    from .fake_server import FakeServer

pytestmark = pytest.mark.slow

STORY = """# A story

It has *one* hero, **two** foes and `code`, __both__ _ways_, snake_case_names and 2 * 3 * 4:

- first
  - inner
- second

3. third

4. fourth

> a quote

| name | sum |
|------|----:|
| a \\| b | 12 |
| **c** | 30 |

```python
if 1 < 2: print("*no emphasis*")
```
See [the site](https://example.org/x), https://example.org/y. And
"""
HOSTILE = """[not this](javascript:alert(1)) [nor](data:text/html,x) [this](https://evil.example/)
[bank.example](https://evil.example/) ![pixel](https://evil.example/p.png)
<img src=x onerror="window.broken = 1"><script>window.broken = 1</script>
<a href="javascript:window.broken = 1">x</a> <https://ok.example/> &lt;b&gt;
"""
ZALGO = "Z" + "\u0300\u0316" * 400 + "\u202eevil\u202c \u0000 \ud83d\ude00 " + "x" * 5_000
AS_TEXT = """async (text) => {
  const { parseBlocks } = await import("/static/markdown.js");
  const blocks = parseBlocks(text.split("\\n"));
  return blocks.map(({ node }) => node.textContent).join("").length;
}"""
GROWN_AND_WHOLE = """async ([text, step]) => {
  const { GrowingText } = await import("/static/growing_text.js");
  const [grown, whole] = ["div", "div"].map((name) => document.createElement(name));
  const growing = new GrowingText(grown);
  for (let end = 0; end < text.length + step; end += step) growing.show(text.slice(0, end));
  new GrowingText(whole).show(text);
  return [grown.innerHTML, whole.innerHTML];
}"""
PIECES = (
    *("*", "**a", "_", "__a ", "`", "`a", "[a](", "[", "![", "~", "~~a", "\\", "<http://"),
    *("> ", "> \n", "# ", "```\n", "1. ", "- *", "- a\n", " - a\n  ", "|", "| a\n|-\n"),
    *("- - ", "\n"),
    *("$", "$a", "$$\n", "\\(", "\\(a", "\\[\n", '```py\n"', "```js\n`\\", "```c\n/*"),
    *("https://a", "-", " ", "#", "# a #", "***a"),
)
WATCH_POLICY = """() => {
  window.violations = [];
  addEventListener("securitypolicyviolation", ({ blockedURI }) => violations.push(blockedURI));
}"""


def test_an_answer_is_shown_with_its_form(chat: ChatPage, server: FakeServer) -> None:
    answered(chat, server, "Show me", *STORY.splitlines(keepends=True), tokens=9)
    answer = chat.answer
    expect(answer.get_by_role("heading", name="A story")).to_be_visible()
    expect(answer.locator("em")).to_have_text(["one", "ways"])
    expect(answer.locator("p strong")).to_have_text(["two", "both"])
    expect(answer.locator("p code")).to_have_text("code")
    expect(answer.locator("p").first).to_contain_text("snake_case_names and 2 * 3 * 4")
    expect(answer.locator(".text > ul > li, > ul > li")).to_have_count(2)
    expect(answer.locator("ul ul li")).to_have_text("inner")
    expect(answer.locator("ol[start='3'] li")).to_have_text(["third", "fourth"])
    expect(answer.locator("blockquote")).to_have_text("a quote")
    expect(answer.locator("th")).to_have_text(["name", "sum"])
    expect(answer.locator("td")).to_have_text(["a | b", "12", "c", "30"])
    expect(answer.locator("pre")).to_have_text('if 1 < 2: print("*no emphasis*")')
    links = answer.locator("a")
    expect(links).to_have_text(["the site", "https://example.org/y"])
    for link in links.all():
        expect(link).to_have_attribute("rel", "noopener noreferrer nofollow")


def test_hostile_text_runs_loads_and_hides_nothing(chat: ChatPage, server: FakeServer) -> None:
    chat.page.evaluate(WATCH_POLICY)
    asked: list[str] = []
    chat.page.on("request", lambda request: asked.append(request.url))
    answered(chat, server, "Show me", HOSTILE, ZALGO, tokens=9)
    answer = chat.answer
    expect(answer.locator("img, script, iframe, object, style, form, input")).to_have_count(0)
    addresses = answer.locator("a").evaluate_all("links => links.map((link) => link.href)")
    assert {address.split("/")[2] for address in addresses} == {"evil.example", "ok.example"}
    assert all(address.startswith("https://") for address in addresses)
    expect(answer).to_contain_text("[not this](javascript:alert(1))")
    expect(answer).to_contain_text("<script>window.broken = 1</script>")
    expect(answer).to_contain_text("&lt;b&gt;")
    expect(answer).to_contain_text("bank.example (evil.example)")
    wide = "[document.documentElement, scroller].some((e) => e.scrollWidth > e.clientWidth)"
    assert not chat.page.evaluate(wide)
    # What is stacked above and below letters stays within the answer.
    assert answer.evaluate("node => getComputedStyle(node).overflowY") == "clip"
    assert chat.page.evaluate("[window.broken, violations]") == [None, []]
    assert not [url for url in asked if not url.startswith(server.url)]


def test_a_text_without_form_stays_as_it_was_written(chat: ChatPage, server: FakeServer) -> None:
    answered(chat, server, "Plainly", "one\n", "two  three", tokens=3)
    expect(chat.facts).to_contain_text("3 tokens")
    assert chat.answer.evaluate("node => node.textContent") == "one\ntwo  three"
    expect(chat.answer.locator("*")).to_have_count(1)


def test_a_text_that_grew_looks_as_if_it_had_come_at_once(chat: ChatPage) -> None:
    for step in (1, 7, 64):
        grown, whole = chat.page.evaluate(GROWN_AND_WHOLE, [STORY + HOSTILE + STORY, step])
        assert grown == whole, step


def test_growing_text_leaves_a_selection_alone(chat: ChatPage, server: FakeServer) -> None:
    exchange = begun(chat, server, "Tell me a story.", "Once upon a time")
    chat.page.evaluate(
        "getSelection().setBaseAndExtent(document.querySelector('.answer .text p').firstChild, 5,"
        " document.querySelector('.answer .text p').firstChild, 9)"
    )
    exchange.say(" there was a dragon.\n\nIt slept.").complete(9)
    expect(chat.button("Regenerate")).to_be_visible()
    expect(chat.answer.locator("p")).to_have_count(2)
    assert chat.page.evaluate("String(getSelection())") == "upon"


def test_code_can_be_copied(own_chat: ChatPage, server: FakeServer) -> None:
    own_chat.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    own_chat.ask("Show me")
    code = "def f():\n    return 1 < 2"
    server.next_exchange().created().say(f"Here:\n```py\n{code}\n```\n").complete(8)
    expect(own_chat.button("Regenerate")).to_be_visible()
    own_chat.stop_clock()
    own_chat.button("Copy code").click()
    expect(own_chat.button("Copied")).to_be_visible()
    assert own_chat.page.evaluate("navigator.clipboard.readText()") == code


def test_no_text_takes_the_page_long(chat: ChatPage) -> None:
    """A pattern that tries twice would never come back, and the test would meet its deadline."""
    for piece in PIECES:
        made = chat.page.evaluate(AS_TEXT, piece * 20_000 + "\u0001")
        assert made <= 2 * len(piece) * 20_000, piece


FORMULAS = r"""Euler: $e^{i\pi} = -1$ and \(\frac{1}{2}\), for $5 or $10 each, \$3$.

$$
\sum_{n=1}^{\infty} \frac{1}{n^2} = \frac{\pi^2}{6}
$$

\[ x \]

`$code$` and $\unknowncommand{x}$ and $\href{javascript:alert(1)}{x}$
"""


def test_formulas_are_set_and_everything_else_stays_text(
    tab_chat: ChatPage, server: FakeServer
) -> None:
    chat = tab_chat
    chat.page.evaluate(WATCH_POLICY)
    answered(chat, server, "Show me", *FORMULAS.splitlines(keepends=True), tokens=9)
    answer = chat.answer
    expect(answer.locator("span.math math")).to_have_count(2)
    expect(answer.locator("div.math math")).to_have_count(2)
    expect(answer.locator("mfrac")).to_have_count(3)
    expect(answer.locator("p").first).to_contain_text("for $5 or $10 each, $3$.")
    expect(answer.locator("code")).to_have_text("$code$")
    expect(answer).to_contain_text(r"$\unknowncommand{x}$")
    expect(answer.locator("[href^='javascript']")).to_have_count(0)
    assert chat.page.evaluate("violations") == []


def test_code_is_coloured_and_keeps_its_text(chat: ChatPage, server: FakeServer) -> None:
    code = 'def f(x):  # twice\n    return "two" * 2 + x'
    chat.ask("Show me")
    server.next_exchange().created().say(f"```python\n{code}\n```\n\n```nolang\ndef\n```").complete(
        8
    )
    expect(chat.button("Regenerate")).to_be_visible()
    pre = chat.answer.locator("pre").first
    assert pre.evaluate("node => node.textContent") == code
    expect(pre.locator(".code-word")).to_have_text(["def", "return"])
    expect(pre.locator(".code-comment")).to_have_text("# twice")
    expect(pre.locator(".code-string")).to_have_text('"two"')
    expect(pre.locator(".code-number")).to_have_text("2")
    expect(chat.answer.locator("pre").nth(1).locator("span")).to_have_count(0)
