"""Tests of the grammars of required tool calls, in each format."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from server.text.tool_forms.table import HARMONY, PYTHONIC, QWEN3_CODER
from server.text.tool_forms.tool_calls import (
    GRANITE,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    PHI,
    CallRules,
    CallSchema,
    UnenforceableSchemaError,
)
from tests.server.tiny_text import PAD_ID, tiny_tokenizer
from triolet.grammar import build_tokenizer, compile_grammar
from triolet.sampling import Grammar, GrammarKind

from .tool_cases import Case, harmony, hermes, listed, read, xml

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

    from server.text.tool_forms.tool_calls import ToolForm

ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/name"},
        "days": {"type": "integer"},
        "dry": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 8}},
}
TOOLS = (
    CallSchema("weather", ARGUMENTS, is_strict=True),
    CallSchema("clock", {"type": "object", "properties": {}, "additionalProperties": False}),
)
FORMS: dict[str, ToolForm] = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral, named": MISTRAL_NAMED,
    "qwen3_coder": QWEN3_CODER,
    "pythonic": PYTHONIC,
    "granite": GRANITE,
    "phi": PHI,
    "harmony": HARMONY,
}


def written(kind: str, city: str = "Bonn", *, is_twice: bool = False, key: str = "city") -> str:
    """Return a call of `weather`, or that and a call of `clock`."""
    told = {key: city, "days": 3}
    calls: list[tuple[str, object]] = [("weather", told), ("clock", {})][: 1 + is_twice]
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    match kind:
        case "hermes":
            return hermes(*objects)
        case "llama":
            return "; ".join(json.dumps(o).replace('"arguments"', '"parameters"') for o in objects)
        case "mistral":
            return "[TOOL_CALLS]" + listed(*calls)
        case "mistral, named":
            return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)
        case "qwen3_coder":
            first = xml("weather", **{key: city, "days": "3"})
            return first + ("\n" + xml("clock") if is_twice else "")
        case "pythonic":
            second = ", clock()" if is_twice else ""
            return f"[weather({key}={json.dumps(city)}, days=3){second}]"
        case "granite":
            return "<|tool_call|>" + listed(*calls)
        case "phi":
            return f"<|tool_call|>{listed(*calls)}<|/tool_call|>"
    head = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    return head + call + json.dumps(told)


@cache
def tokenizer_of(*markers: str) -> Tokenizer:
    """Return a tokenizer that has some markers as special tokens."""
    return tiny_tokenizer(markers)


@cache
def matchers_of(*markers: str) -> LLTokenizer:
    return build_tokenizer(
        tokenizer_of(*markers).to_str(), (PAD_ID,)
    )  # its end token is a harmony marker


def accepts(form: ToolForm, text: str, *, is_tokens: bool, **rules: Any) -> bool:  # noqa: ANN401
    """Return whether a format's grammar accepts a complete completion."""
    markers = tuple(form.markers) if is_tokens else ()
    tokenizer = tokenizer_of(*markers)
    added = tokenizer.get_added_tokens_decoder()
    token_ids = {t.content: i for i, t in added.items() if t.content in form.markers}
    demanded = CallRules(TOOLS, token_ids=token_ids, **rules)
    source = "\n".join(["%llguidance {}", *form.rules(demanded)])
    matcher = compile_grammar(matchers_of(*markers), Grammar(GrammarKind.LARK, source))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("is_tokens", [True, False], ids=["tokens", "characters"])
@pytest.mark.parametrize("kind", FORMS)
def test_a_completion_that_has_to_be_calls_is_nothing_else(kind: str, is_tokens: bool) -> None:
    if kind == "harmony" and not is_tokens:
        return  # its markers are tokens in all of its models
    form = FORMS[kind]
    forced = {"is_forced": True, "is_single": False, "is_tokens": is_tokens}
    assert accepts(form, written(kind), **forced)
    assert kind == "harmony" or accepts(form, written(kind, is_twice=True), **forced)
    assert not accepts(form, "Hello", **forced)
    assert not accepts(form, "", **forced)
    assert not accepts(form, "Hm. " + written(kind), **forced)
    assert not accepts(form, written(kind, key="town"), **forced)
    assert not accepts(form, written(kind, "Bonn am Rhein"), **forced)
    single = forced | {"is_single": True}
    assert accepts(form, written(kind), **single)
    assert kind == "harmony" or not accepts(form, written(kind, is_twice=True), **single)


@pytest.mark.parametrize("kind", FORMS)
def test_calls_beside_text_keep_to_a_strict_schema(kind: str) -> None:
    form = FORMS[kind]
    free = {"is_forced": False, "is_single": False, "is_tokens": True}
    text = "Hello <b> there"
    if kind == "harmony":
        text = f"<|channel|>final<|message|>{text}"
    assert accepts(form, text, **free)
    assert accepts(form, written(kind), **free)
    assert not accepts(form, written(kind, key="town"), **free)
    if kind not in ("llama", "pythonic", "harmony"):
        assert accepts(form, "I look. " + written(kind, is_twice=True), **free)


@pytest.mark.parametrize("kind", FORMS)
def test_what_a_grammar_demands_is_read_as_the_calls_that_it_is(kind: str) -> None:
    text = written(kind, is_twice=kind != "harmony")
    if kind == "harmony":
        text = harmony(text.replace("<|", "«").replace("|>", "»"))
    calls = read(Case(FORMS[kind], text, "", []), [text]).calls
    assert [(name, json.loads(told)) for name, told in calls] == [
        ("weather", {"city": "Bonn", "days": 3}),
        ("clock", {}),
    ][: len(calls)]
    assert len(calls) == 1 + (kind != "harmony")


def test_arguments_without_required_ones_may_be_any_of_them() -> None:
    anything = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}, "c-d": {}}}
    rules = PYTHONIC.rules(CallRules([CallSchema("f", anything)], True, True, {}))
    grammar = Grammar(GrammarKind.LARK, "\n".join(["%llguidance {}", *rules]))
    for text in ("[f()]", "[f(a=1)]", '[f(b="x")]', '[f(a=1, b=["x"])]'):
        ids = list(text.encode())
        matcher = compile_grammar(matchers_of(), grammar)
        assert matcher.try_consume_tokens(ids) == len(ids)
        assert matcher.is_accepting()


@pytest.mark.parametrize("form", [QWEN3_CODER, PYTHONIC])
def test_a_tool_without_listed_properties_takes_any(form: ToolForm) -> None:
    rules = form.rules(CallRules([CallSchema("f", {"type": "object"})], True, True, {}))
    grammar = Grammar(GrammarKind.LARK, "\n".join(["%llguidance {}", *rules]))
    text = xml("f", a="1", b="x y") if form is QWEN3_CODER else '[f(a=1, b="x y")]'
    matcher = compile_grammar(matchers_of(), grammar)
    assert matcher.try_consume_tokens(list(text.encode())) == len(text)
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        (QWEN3_CODER, {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}),
        (QWEN3_CODER, {"type": "object"}),
        (PYTHONIC, {"type": "object", "properties": {"a-b": {"type": "string"}}}),
        (PYTHONIC, {"type": "object"}),
    ],
)
def test_a_strict_schema_beyond_a_form_is_refused(form: ToolForm, schema: dict[str, Any]) -> None:
    strict, lenient = (CallSchema("f", schema, is_strict=is_on) for is_on in (True, False))
    assert form.rules(CallRules([lenient], True, True, {}))
    with pytest.raises(UnenforceableSchemaError, match="f"):
        form.rules(CallRules([strict], True, True, {}))


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (QWEN3_CODER, "a>b"),
        (QWEN3_CODER, "a\nb"),
        (QWEN3_CODER, ""),
        (QWEN3_CODER, "n" * 257),
        (PYTHONIC, "a-b"),
        (PYTHONIC, "n" * 257),
    ],
)
def test_a_property_that_no_call_can_hold_is_refused_or_left_out(form: ToolForm, name: str) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: {"type": "integer"}, "a": {"type": "integer"}},
        "additionalProperties": False,
    }
    shown = json.dumps(name[:64]).strip('"')
    for more, is_strict in (({}, True), ({"required": [name]}, False)):
        with pytest.raises(UnenforceableSchemaError) as refused:
            form.rules(CallRules([CallSchema("f", schema | more, is_strict)], True, True, {}))
        assert shown in str(refused.value)
        assert len(str(refused.value)) < 200
    rules = form.rules(CallRules([CallSchema("f", schema)], True, True, {}))
    assert name[:65] not in "\n".join(rules) or not name
    text = xml("f", a="1") if form is QWEN3_CODER else "[f(a=1)]"
    matcher = compile_grammar(
        matchers_of(), Grammar(GrammarKind.LARK, "\n".join(["%llguidance {}", *rules]))
    )
    assert matcher.try_consume_tokens(list(text.encode())) == len(text)
    assert matcher.is_accepting()


@pytest.mark.parametrize("form", [QWEN3_CODER, PYTHONIC])
def test_the_longest_name_that_is_written_is_read(form: ToolForm) -> None:
    name = "n" * 256
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    assert form.rules(CallRules([CallSchema("f", schema, is_strict=True)], True, True, {}))
    text = xml("f", **{name: "1"}) if form is QWEN3_CODER else f"[f({name}=1)]"
    (call,) = read(Case(form, text, "", []), list(text)).calls
    assert (call[0], json.loads(call[1])) == ("f", {name: 1})


@pytest.mark.parametrize("form", [QWEN3_CODER, PYTHONIC])
def test_a_property_that_is_required_and_not_listed_has_to_be_written(form: ToolForm) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]}
    rules = form.rules(CallRules([CallSchema("f", schema)], True, True, {}))
    grammar = Grammar(GrammarKind.LARK, "\n".join(["%llguidance {}", *rules]))
    for told, is_whole in (({"a": "1"}, False), ({"b": '"x"'}, True)):
        text = xml("f", **told)
        if form is PYTHONIC:
            text = "[f(" + ", ".join(f"{k}={v}" for k, v in told.items()) + ")]"
        matcher = compile_grammar(matchers_of(), grammar)
        ids = list(text.encode())
        assert (matcher.try_consume_tokens(ids) == len(ids)) is is_whole
