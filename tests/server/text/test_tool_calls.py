"""Tests of parsing tool calls in each format: the result does not depend on how the text is split,
and other text stays text."""

from __future__ import annotations

import json
import random

import pytest

from server.text.tool_forms.repeats import OnceEach
from server.text.tool_forms.table import HARMONY, PYTHONIC, QWEN3_CODER, form_of
from server.text.tool_forms.tool_calls import (
    GRANITE,
    HERMES,
    LLAMA,
    MAX_BLANKS,
    MISTRAL,
    MISTRAL_NAMED,
    PHI,
    Arguments,
    CallBegins,
    Text,
    ToolForm,
)
from server.text.tool_forms.typed_values import MAX_LITERAL_CHARS, python_json
from triolet.config import ToolParser

from .tool_cases import CASES, MARKERS, Case, harmony, hermes, joined, read


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


OPENINGS: dict[int, tuple[str, ...]] = {
    id(LLAMA): ('{"name"', '{"parameters"', '{"type"'),
    id(PHI): ("<|tool_call|>", "functools["),
    id(QWEN3_CODER): ("<tool_call>", "<function="),
    id(PYTHONIC): ("[f(", "<|python_start|>"),
    id(HARMONY): (" to=",),
}
"""Call openings that differ from the format's markers."""


@pytest.mark.parametrize("case", [case for case in CASES if case.calls])
def test_a_call_that_is_cut_is_never_text(case: Case) -> None:
    whole = read(case, [case.text])
    openings = OPENINGS.get(id(case.form), tuple(case.form.markers))
    for end in range(len(case.text)):
        cut = read(case, [case.text[:end]], is_cut=True)
        length = len(cut.shown)
        while not whole.shown.startswith(cut.shown[:length]):
            length -= 1
        if begun := cut.shown[length:]:
            assert any(word.startswith(begun) and word != begun for word in openings), begun
            assert not cut.calls or whole.shown
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


FRAGMENTS = (
    *MARKERS.split(),
    *("<tool_call>\n", "<function=f>", "<function=", "<parameter=word>", "</parameter>\n"),
    *("<|python_start|>", "<|python_end|>", "[f(", "f(x=", "word=", ")", "]", "[", ", ", "=", "*"),
    *(
        '{"name": "f", "arguments": ',
        '{"name": "f", "parameters": ',
        '{"x": 1}',
        "}",
        "{",
        '"',
        "'",
    ),
    *('"name"', '"arguments": ', ": ", '"f"', "f", "1", "é", " ", "\n", "\\", " " * 70, " " * 300),
    *(
        "a" * 260,
        "<|message|>",
        "<|channel|>",
        "<|start|>assistant",
        "final",
        " to=functions.f",
        "<",
    ),
    *("[CALL_ID]", "a1", "; ", '"""', "'' ", "#", "null", "-1.5", "</tool_call>", "text "),
)


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize(
    ("form", "begin"),
    [
        (HERMES, "<tool_call>"),
        (LLAMA, "{"),
        (MISTRAL, "[TOOL_CALLS]["),
        (MISTRAL_NAMED, "[TOOL_CALLS]f"),
        (GRANITE, "<|tool_call|>["),
        (PHI, "functools["),
        (QWEN3_CODER, "<tool_call><function=f>"),
        (PYTHONIC, "[f(x="),
        (HARMONY, harmony("«channel»commentary to=functions.f«message»")),
    ],
)
def test_any_text_is_read_the_same_however_it_is_cut(
    form: ToolForm, begin: str, is_cut: bool
) -> None:
    chance = random.Random(7)
    for _ in range(150):
        text = chance.choice((begin, ""))
        text += "".join(chance.choices(FRAGMENTS, k=chance.randint(1, 14)))
        case = Case(form, text, "", [])
        expected = read(case, [text], is_cut=is_cut)
        assert read(case, list(text), is_cut=is_cut) == expected, text
        place = chance.randrange(len(text))
        assert read(case, [text[:place], text[place:]], is_cut=is_cut) == expected, text


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


@pytest.mark.parametrize(
    ("form", "begin", "filling"),
    [
        *((form, "", " ") for form in (HERMES, LLAMA, QWEN3_CODER, PYTHONIC)),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}', " "),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "\n"),
        (HERMES, '<tool_call>{"name": "f", "arguments":', " "),
        (LLAMA, '{"name": "f", "parameters": {}}', ";"),
        (LLAMA, '{"name": "f", "parameters": {}}', " "),
        (GRANITE, '<|tool_call|>[{"name": "f", "arguments": {}}', " "),
        (GRANITE, '<|tool_call|>[{"name": "f", "arguments": {}}', ", "),
        (GRANITE, '<|tool_call|>[{"name": "f", "arguments": {}}]', " "),
        (PHI, '<|tool_call|>[{"name": "f", "arguments": {}}]', " "),
        (PHI, "<|tool_call|>[", " "),
        (QWEN3_CODER, "<function=f>", " "),
        (QWEN3_CODER, "<function=f></function>", " "),
        (PYTHONIC, "<|python_start|>", " "),
        (PYTHONIC, "[f(", ","),
        (PYTHONIC, "[f(x=1,", " "),
        (PYTHONIC, "[f()", " "),
        (PYTHONIC, "[f()]", " "),
        (PYTHONIC, "[f()]", "<|python_end|>"),
    ],
)
def test_blanks_and_separators_are_held_to_a_bound(
    form: ToolForm, begin: str, filling: str
) -> None:
    reader = form.reader()
    reader.push(begin)
    looked_at = 0
    for _ in range(1000):
        reader.push(filling)
        looked_at = max(looked_at, len(vars(reader)["_held"]))
    assert looked_at <= MAX_BLANKS + len(begin) + len(filling)


@pytest.mark.parametrize(("num_blanks", "is_shown"), [(64, True), (65, False)])
def test_a_head_with_more_blanks_is_read_with_its_whole_object(
    num_blanks: int, is_shown: bool
) -> None:
    blanks = " " * num_blanks
    head = f'<tool_call>{{"name"{blanks}:{blanks}"f"{blanks},{blanks}"arguments"{blanks}: {{"x": 1'
    for parts in ([head], list(head)):
        reader = HERMES.reader()
        begun = [piece for part in parts for piece in reader.push(part)]
        assert (begun[:1] == [CallBegins(0, "f")]) is is_shown
        assert joined([*begun, *reader.push("}}")]).calls == [("f", '{"x": 1}')]


CALLED = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "if a <"),
        (HERMES, "if a <tool_cal"),
        (HERMES, CALLED + " so if a <"),
        (HERMES, " "),
        (GRANITE, "a <|tool"),
        (MISTRAL, "see [T"),
        (PHI, "if"),
        (PHI, "import functools"),
        (PHI, "import functools\n"),
        (LLAMA, "{"),
        (LLAMA, ' {"na'),
        (QWEN3_CODER, "a <func"),
        (QWEN3_CODER, "<tool_call"),
        (PYTHONIC, "["),
        (PYTHONIC, "[see"),
        (PYTHONIC, "<|python_st"),
        (PYTHONIC, "[f()] so if a <"),
        (HARMONY, harmony("«channel»final«message»if a <")),
        (HARMONY, " t"),
        (HARMONY, "if a <"),
    ],
)
def test_the_beginning_of_an_opening_is_text_where_a_completion_is_cut(
    form: ToolForm, text: str
) -> None:
    shown = text.replace(CALLED, "").replace("[f()]", "").rpartition("\udc00")[2]
    for parts in ([text], list(text)):
        assert read(Case(form, text, "", []), parts, is_cut=True).shown == shown


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "<tool_call>"),
        (HERMES, '<tool_call>\n{"na'),
        (HERMES, CALLED + "\n<tool_"),
        (GRANITE, "<tool_call> ["),
        (MISTRAL_NAMED, "[TOOL_CALLS]f"),
        (PHI, "functools["),
        (LLAMA, '{"name"'),
        (LLAMA, '{"name": "f", "parameters": {}}; {"n'),
        (QWEN3_CODER, "<function="),
        (QWEN3_CODER, "<tool_call>\n<func"),
        (QWEN3_CODER, "<function=f>\n</function>\n</tool"),
        (PYTHONIC, "[f("),
        (PYTHONIC, "[f(a=1), g"),
        (PYTHONIC, "<|python_start|>["),
        (PYTHONIC, "[f()]<|python_"),
        (HARMONY, " to=functions.f"),
        (HARMONY, harmony("«channel»commentary to")),
    ],
)
def test_half_a_call_behind_a_whole_opening_is_no_text(form: ToolForm, text: str) -> None:
    for parts in ([text], list(text)):
        assert read(Case(form, text, "", []), parts, is_cut=True).shown == ""


@pytest.mark.parametrize(
    ("form", "opening"), [(HERMES, "<tool_call>"), (GRANITE, "<|tool_call|>["), (LLAMA, "")]
)
def test_a_tag_ends_arguments_whose_brackets_were_forgotten(form: ToolForm, opening: str) -> None:
    key = "parameters" if form is LLAMA else "arguments"
    call = f'{opening}{{"name": "f", "{key}": {{"x": {{"y": "<"'
    text = f"{call}}}</tool_call>{CALLED}"
    for parts in ([text], list(text)):
        calls = read(Case(form, text, "", []), parts).calls
        assert calls == [("f", '{"x": {"y": "<"}'), ("f", "{}")][: 1 + (form is not LLAMA)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[f(word="/tmp/x)]', "{"),
        ("[f(x=(1, 2]", "{"),
        ('[f(x="x"\n\nI have called it.', "{"),
        ("[f(), f(x=1, word='a", '{"x": 1'),
        ("[f(x=1, word=", '{"x": 1'),
        ("[f(x=1, wor", '{"x": 1'),
        ("[f(x=1, word='a<|python_end|>", '{"x": 1'),
    ],
)
def test_a_python_call_with_a_broken_argument_is_never_whole(text: str, told: str) -> None:
    for parts in ([text], list(text)):
        said = read(Case(PYTHONIC, text, "", []), parts)
        assert (said.shown, said.calls[-1]) == ("", ("f", told))


@pytest.mark.parametrize("num_chars", [256, 257])
@pytest.mark.parametrize("num_blanks", [64, 65])
def test_names_and_blanks_of_python_calls_have_bounds(num_chars: int, num_blanks: int) -> None:
    name, blanks = "n" * num_chars, " " * num_blanks
    text = f"[f({blanks}{name}{blanks}=1)]"
    case = Case(PYTHONIC, text, "", [])
    is_call = num_chars == 256 and num_blanks == 64
    expected = ("", [("f", {name: 1})], "") if is_call else (text, [], "")
    assert parsed(case, list(text)) == expected
    for place in range(len(text)):
        assert parsed(case, [text[:place], text[place:]]) == expected
