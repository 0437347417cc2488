"""Calls are found however their text is cut, and what is none stays text."""

from __future__ import annotations

import json
import random

import pytest

from server.text.tool_calls import (
    HERMES,
    LLAMA,
    Arguments,
    CallBegins,
    Text,
    ToolCallParser,
    ToolForm,
    form_of,
)

Calls = list[tuple[str, object]]
NESTED = {"a": ['}]"', {"b": "\\"}], "ü": "</tool_call>"}


def hermes(*calls: object) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


CASES: list[tuple[ToolForm, str, str, Calls]] = [
    (HERMES, "Just text, with < and <tool.", "Just text, with < and <tool.", []),
    (HERMES, hermes({"name": "f", "arguments": {"x": 1}}), "", [("f", {"x": 1})]),
    (
        HERMES,
        "Let me see. " + hermes({"name": "f", "arguments": {}}, {"name": "g", "arguments": NESTED}),
        "Let me see. ",
        [("f", {}), ("g", NESTED)],
    ),
    (HERMES, hermes({"arguments": {"x": 1}, "name": "f"}), "", [("f", {"x": 1})]),
    (HERMES, hermes({"name": "f", "arguments": None}), "", [("f", None)]),
    (HERMES, "<tool_call>no JSON</tool_call> ok", "<tool_call>no JSON</tool_call> ok", []),
    (HERMES, '<tool_call>{"name": "f"', '{"name": "f"', []),
    (LLAMA, '{"name": "f", "parameters": {"x": [1, 2]}}', "", [("f", {"x": [1, 2]})]),
    (
        LLAMA,
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"y": "z"}}',
        "",
        [("f", {}), ("g", {"y": "z"})],
    ),
    (LLAMA, '{"parameters": {"x": 1}, "name": "f"}', "", [("f", {"x": 1})]),
    (LLAMA, 'Hello {"name": "f"}', 'Hello {"name": "f"}', []),
    (LLAMA, '{"not": "a call"}', '{"not": "a call"}', []),
]


def read(form: ToolForm, pieces: list[str]) -> tuple[str, Calls]:
    """Return text and calls, put together as a client would."""
    parser = ToolCallParser(form)
    found = [piece for text in pieces for piece in parser.push(text)] + parser.finish()
    text = ""
    names: list[str] = []
    arguments: list[str] = []
    for piece in found:
        match piece:
            case Text():
                text += piece.text
            case CallBegins():
                assert piece.index == len(names)
                names.append(piece.name)
                arguments.append("")
            case Arguments():
                assert piece.index == len(names) - 1
                arguments[-1] += piece.text
    assert parser.num_calls == len(names)
    return text, [(name, json.loads(a)) for name, a in zip(names, arguments, strict=True)]


@pytest.mark.parametrize(("form", "text", "shown", "calls"), CASES)
def test_calls_are_found_however_their_text_is_cut(
    form: ToolForm, text: str, shown: str, calls: Calls
) -> None:
    assert read(form, [text]) == (shown, calls)
    assert read(form, list(text)) == (shown, calls)
    chance = random.Random(7)
    for _ in range(50):
        cuts = sorted(chance.sample(range(1, len(text)), 3))
        borders = zip([0, *cuts], [*cuts, len(text)], strict=True)
        assert read(form, [text[a:b] for a, b in borders]) == (shown, calls)


def test_arguments_are_shown_as_they_come() -> None:
    parser = ToolCallParser(HERMES)
    assert parser.push('<tool_call>{"name": "f", "arguments": {"x": "a') == [
        CallBegins(0, "f"),
        Arguments(0, '{"x": "a'),
    ]
    assert parser.push('b"') == [Arguments(0, 'b"')]


def test_text_is_held_back_only_while_it_may_be_a_call() -> None:
    parser = ToolCallParser(HERMES)
    assert parser.push("a <to") == [Text("a ")]
    assert parser.push("ad") == [Text("<toad")]


def test_the_template_tells_the_form() -> None:
    assert form_of(["{{ '<tool_call>' }}"]) is HERMES
    assert form_of(["<|python_tag|>"]) is LLAMA
    assert form_of(["{{ messages }}"]) is HERMES
    assert form_of([]) is HERMES
