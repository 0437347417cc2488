"""Calls are found in each family's form however their text is cut, and what is none stays text."""

from __future__ import annotations

import json

import pytest

from server.text.tool_calls import (
    GRANITE,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    PHI,
    Arguments,
    CallBegins,
    Text,
    ToolForm,
)
from server.text.tool_forms.repeats import OnceEach
from server.text.tool_forms.table import HARMONY, PYTHONIC, QWEN3_CODER, form_of
from server.text.tool_forms.typed_values import MAX_LITERAL_CHARS, python_json
from triolet.config import ToolParser

from .tool_cases import CASES, Case, hermes, joined, read


def parsed(case: Case, parts: list[str]) -> tuple[str, list[tuple[str, object]], str]:
    said = read(case, parts)
    return said.shown, [(name, json.loads(told)) for name, told in said.calls], said.thoughts


@pytest.mark.parametrize("case", CASES)
def test_calls_are_found_however_their_text_is_cut(case: Case) -> None:
    expected = (case.shown, case.calls, case.thoughts)
    assert parsed(case, [case.text]) == expected
    assert parsed(case, list(case.text)) == expected
    for place in range(1, len(case.text)):
        assert parsed(case, [case.text[:place], case.text[place:]]) == expected


@pytest.mark.parametrize("case", [case for case in CASES if case.calls])
def test_a_call_that_is_cut_is_never_text(case: Case) -> None:
    whole = read(case, [case.text])
    for end in range(len(case.text)):
        cut = read(case, [case.text[:end]], is_cut=True)
        assert whole.shown.startswith(cut.shown)
        assert whole.thoughts.startswith(cut.thoughts)
        *before, (name, told) = cut.calls or [("", "")]
        assert before == whole.calls[: len(before)]
        if name:
            assert whole.calls[len(before)][0] == name
            assert whole.calls[len(before)][1].startswith(told)


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_at_once_is_what_is_read_by_the_character(case: Case) -> None:
    for end in range(0, len(case.text), 11):
        text = case.text[:end]
        assert read(case, [text], is_cut=True) == read(case, list(text), is_cut=True)
        assert read(case, [text]) == read(case, list(text))


def test_arguments_are_shown_as_they_come() -> None:
    reader = HERMES.reader()
    assert reader.push('<tool_call>{"name": "f", "arguments": {"x": "a') == [
        CallBegins(0, "f"),
        Arguments(0, '{"x": "a'),
    ]
    assert reader.push('b"') == [Arguments(0, 'b"')]


def test_arguments_in_tags_are_shown_one_by_one() -> None:
    reader = QWEN3_CODER.reader()
    assert reader.push("<tool_call><function=f><parameter=x>1</parameter>") == [CallBegins(0, "f")]
    assert reader.push("<parameter=y>2") == [Arguments(0, '{"x": 1')]
    assert reader.push("</parameter></function></tool_call>") == [
        Arguments(0, ', "y": 2'),
        Arguments(0, "}"),
    ]


def test_text_is_held_back_only_while_it_may_be_a_call() -> None:
    reader = HERMES.reader()
    assert reader.push("a <to") == [Text("a ")]
    assert reader.push("ad") == [Text("<toad")]
    bare = LLAMA.reader()
    assert bare.push('{"na') == []
    assert bare.push('tion": ') == [Text('{"nation": ')]


def test_a_call_that_repeats_an_earlier_one_is_left_out() -> None:
    first, second = {"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 12}}
    text = hermes(first, second, first, second)
    for parts in ([text], list(text)):
        reader, watch = OnceEach(HERMES).reader(), OnceEach(HERMES).watch()
        pieces = [piece for part in parts for piece in reader.push(part)] + reader.finish()
        assert joined(pieces).calls == [("f", '{"x": 1}'), ("f", '{"x": 12}')]
        assert reader.num_calls == 2
        ends = [watch.push(part) for part in parts]
        assert ends.index(True) == (
            0 if len(parts) == 1 else text.index("1}}", len(hermes(first, second))) + 1
        )


LLAMA_PYTHON = "Write [func_name1(params_name1=params_value1, params_name2=params_value2)]."
PHI_TEMPLATE = "<|tool|>{{ tools }}<|/tool|> Answer with functools[{{ '{' }}...]"
LATE_HERMES = "{{ '<|start_of_role|>' }} within <tool_call></tool_call> tags"


@pytest.mark.parametrize(
    ("templates", "tokens", "form"),
    [
        (["{{ '<tool_call>' }}"], [], HERMES),
        (["<|python_tag|>"], [], LLAMA),
        (["{{ messages }}"], [], HERMES),
        ([], [], HERMES),
        (["{{ '[TOOL_CALLS] [' }}"], [], MISTRAL),
        (["{{ '[TOOL_CALLS]' + name + '[ARGS]' }}"], [], MISTRAL_NAMED),
        (["{{ messages }}"], ["[TOOL_CALLS]"], MISTRAL),
        (["{{ messages }}"], ["[TOOL_CALLS]", "[ARGS]"], MISTRAL_NAMED),
        (["{{ '<tool_call>\n<function=' }}"], ["<tool_call>"], QWEN3_CODER),
        ([LLAMA_PYTHON], ["<|python_tag|>"], PYTHONIC),
        (["respond only with <|tool_call|> followed by a JSON list"], [], GRANITE),
        (["{{ messages }}"], ["<|tool_call|>"], GRANITE),
        ([LATE_HERMES], ["<|tool_call|>"], HERMES),
        ([PHI_TEMPLATE], [], PHI),
        (["{{ messages }}"], ["<|tool_call|>", "<|/tool_call|>"], PHI),
        (["{{ '<|start|>assistant<|channel|>analysis<|message|>' }}"], [], HARMONY),
    ],
)
def test_template_and_tokens_tell_the_form(
    templates: list[str], tokens: list[str], form: object
) -> None:
    assert form_of(templates, tokens) == form


def test_a_form_that_is_named_goes_before_what_the_template_says() -> None:
    template = ["{{ '<tool_call>' }}"]
    assert form_of(template, (), ToolParser.GRANITE) is GRANITE
    assert form_of(template, ["[TOOL_CALLS]", "[ARGS]"], ToolParser.MISTRAL) is MISTRAL_NAMED
    named = {parser: form_of(template, (), parser) for parser in ToolParser}
    assert len(set(map(id, named.values()))) == len(ToolParser) - 1


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("['a', 'b\\n', \"c'\"]", ["a", "b\n", "c'"]),
        ("{'x': (1, -2.5, None), 'y': {}}", {"x": [1, -2.5, None], "y": {}}),
        ("repr" + "'" * 3, None),
        ("1 < 2", None),
        ("{1: 2}", None),
        ("1e999", None),
        ("[" * 500, None),
        ("-" * 100_000 + "1", None),
        ("1<" * MAX_LITERAL_CHARS + "1", None),
        ("'" + "a" * 2 * MAX_LITERAL_CHARS + "'", "a" * 2 * MAX_LITERAL_CHARS),
    ],
)
def test_a_literal_is_json_and_an_expression_is_not(source: str, value: object) -> None:
    found = python_json(source)
    assert (None if found is None else json.loads(found)) == value


def test_half_of_a_surrogate_pair_in_arguments_is_escaped() -> None:
    text = '[TOOL_CALLS][{"id": "a", "name": "f", "arguments": {"x": "\\ud83d"}}]'
    (call,) = read(Case(MISTRAL, text, "", []), [text]).calls
    assert call == ("f", '{"x": "\\ud83d"}')


@pytest.mark.parametrize(
    ("form", "text", "shown"),
    [
        (GRANITE, "<|tool_call|>[] hello", "hello"),
        (MISTRAL, "[TOOL_CALLS] [] done", "done"),
        (HERMES, '<tool_call>{"arguments": {}, "name": "\\ud83d"}</tool_call>', None),
    ],
)
def test_what_is_no_call_leaves_nothing_out_of_order(
    form: ToolForm, text: str, shown: str | None
) -> None:
    said = read(Case(form, text, "", []), list(text))
    assert not said.calls
    assert said.shown.strip() == (text if shown is None else shown)


@pytest.mark.parametrize(
    ("form", "begin", "filling"),
    [(PYTHONIC, "[f(", "a"), (PYTHONIC, "[f(", " "), (HERMES, "<tool_call>", " ")],
)
def test_what_is_held_back_as_a_call_has_a_bound(form: ToolForm, begin: str, filling: str) -> None:
    reader = form.reader()
    shown = joined([*reader.push(begin), *reader.push(filling * 60)]).shown
    assert not shown
    for _ in range(400):
        shown += joined(reader.push(filling)).shown
    assert (shown + joined(reader.push("x")).shown).startswith(begin)
