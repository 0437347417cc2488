"""Tests of tools in the API: how the model is shown them, the grammar of calls, and calls in the
response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from server.text.tool_forms.scanning import MAX_CONTAINERS, parsed_arguments
from server.text.tool_forms.table import QWEN3_CODER
from server.text.tool_forms.tool_calls import HERMES, LLAMA
from tests.server.support.fakes import FakeFleet, FakeText, saying
from tests.server.support.surface import posted, refused_at, surface
from triolet.grammar import build_tokenizer, compile_grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from server.text.tool_forms.tool_calls import ToolForm
    from triolet.sampling import Grammar

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 8}},
}
OPEN_CITY = {name: value for name, value in CITY.items() if name != "additionalProperties"}
DEMO = Path(__file__).parents[3] / "triolet" / "demo"


def tool(name: str, parameters: object = CITY, **more: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


WEATHER = tool("weather", description="of a city")
CLOCK = {"type": "function", "function": {"name": "clock"}}
BODY: dict[str, Any] = {"messages": HI, "tools": [WEATHER, CLOCK]}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return build_tokenizer((DEMO / "tokenizer.json").read_text(encoding="utf-8"), (1,))


def accepts(tokenizer: LLTokenizer, grammar: Grammar, text: str) -> bool:
    """Return whether a grammar accepts a complete completion."""
    matcher = compile_grammar(tokenizer, grammar)
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


async def grammar_of(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, form: ToolForm = HERMES
) -> Grammar | None:
    monkeypatch.setattr(FakeText, "tool_form", form)
    async with surface() as server:
        answer = await server.post(CHAT, BODY | fields)
        assert answer.status == 200, answer
        return server.fleet.generations[0].request.sampling.grammar


async def test_the_template_is_shown_tools_and_what_came_of_them() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}]},
    ]
    async with surface() as server:
        await server.post(CHAT, BODY | {"messages": messages})
        await server.post(CHAT, BODY | {"tool_choice": "none"})
        shown, hidden = (bytes(g.request.prompt_ids).decode() for g in server.fleet.generations)
    assert shown == (
        "tool weather\ntool clock\nuser: hi\nassistant:  c1=clock({'a': 1})\n"
        "tool of c1: noon\nassistant:"
    )
    assert hidden == "user: hi\nassistant:"


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (
            {"tool_choice": "required"},
            [CALLED, CALLED + "\n" + CALLED],
            ["", "Hello", CALLED.replace("Bonn", "Bonn am Rhein"), CALLED.replace("ath", "hat")],
        ),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [CALLED], [CALLED * 2]),
        (
            {"tool_choice": NAMED},
            ['<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'],
            [CALLED, '<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call>'],
        ),
        (
            {"tools": [tool("weather", strict=True), CLOCK]},
            ["Hello <b>", "", "I see: " + CALLED + " ok"],
            [CALLED.replace("city", "town")],
        ),
        (
            {"tools": [tool("weather", OPEN_CITY)], "tool_choice": "required"},
            [CALLED],
            [CALLED.replace('"}', '", "town": 1}')],
        ),
        (
            {"tools": [tool("weather", {"type": "object"})], "tool_choice": "required"},
            [CALLED],
            [],
        ),
        (
            {"tools": [tool("weather", {"type": "object"}, strict=True)]},
            [CALLED.replace('{"city": "Bonn"}', "{}")],
            [CALLED],
        ),
    ],
)
async def test_what_has_to_be_written_is_a_grammar(
    fields: dict[str, Any],
    good: list[str],
    bad: list[str],
    tokenizer: LLTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammar = await grammar_of(fields, monkeypatch)
    assert grammar is not None
    assert [accepts(tokenizer, grammar, text) for text in good] == [True] * len(good)
    assert [accepts(tokenizer, grammar, text) for text in bad] == [False] * len(bad)


async def test_models_that_write_bare_json_are_held_to_that(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = '{"name": "weather", "parameters": {"city": "Bonn"}}'
    forced = await grammar_of({"tool_choice": "required"}, monkeypatch, LLAMA)
    free = await grammar_of({"tools": [tool("weather", strict=True)]}, monkeypatch, LLAMA)
    assert forced is not None
    assert free is not None
    both = f"{call}; {call}"
    assert [accepts(tokenizer, forced, text) for text in (call, both, "Hi")] == [True, True, False]
    wrong = call.replace("city", "town")
    assert [accepts(tokenizer, free, text) for text in (call, "Hi {", wrong)] == [True, True, False]


async def test_tools_that_may_be_left_alone_are_no_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await grammar_of({}, monkeypatch) is None
    assert await grammar_of({"tool_choice": "auto"}, monkeypatch) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [CLOCK] * 129}, "tools"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        (
            {"tools": [tool("f", {"enum": ["x" * 20_000]})], "tool_choice": "required"},
            "tools.0.function.parameters",
        ),
        (
            {"tools": [tool(f"f{i}", {"enum": ["x" * 9_000]}) for i in range(9)]}
            | {"tool_choice": "required"},
            "tools",
        ),
    ],
)
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    answer = await refused_at(CHAT, BODY | fields)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_calls_are_taken_out_of_a_whole_answer() -> None:
    answer = (
        await posted(CHAT, BODY, fleet=FakeFleet(saying("Well. ", CALLED, "\n", CALLED)))
    ).json
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well. "
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "weather"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Bonn"}] * 2
    assert len({call["id"] for call in calls}) == 2


async def test_text_without_calls_is_an_answer_as_ever() -> None:
    whole = (await posted(CHAT, BODY, fleet=FakeFleet(saying("No <tool", " here.")))).json[
        "choices"
    ][0]
    assert whole["message"] == {
        "role": "assistant",
        "content": "No <tool here.",
        "refusal": None,
    }
    assert whole["finish_reason"] == "stop"


async def test_calls_are_streamed_as_they_come() -> None:
    pieces = [CALLED[i : i + 7] for i in range(0, len(CALLED), 7)]
    events = (
        await posted(CHAT, BODY | {"stream": True}, fleet=FakeFleet(saying("Hi ", *pieces)))
    ).events
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert events[-1] == "[DONE]"
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hi "
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    begin, *rest = calls
    assert begin["id"].startswith("call_")
    assert begin["function"] == {"name": "weather", "arguments": ""}
    assert all(call.keys() == {"index", "function"} for call in rest)
    arguments = "".join(call["function"]["arguments"] for call in rest)
    assert json.loads(arguments) == {"city": "Bonn"}
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


@pytest.mark.parametrize(
    "text",
    [
        "[" * (MAX_CONTAINERS + 1),
        "[" * (MAX_CONTAINERS - 1),  # not too many, but too deep for the parser
        '{"a": [' + "[1]," * MAX_CONTAINERS + "1]}",
    ],
    ids=["many and deep", "deep", "many"],
)
def test_arguments_that_parsers_die_of_stay_text(text: str) -> None:
    assert parsed_arguments(text) == text


async def test_a_required_property_that_no_call_can_hold_is_named_to_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeText, "tool_form", QWEN3_CODER)
    schema = {"type": "object", "properties": {"a>b": {}}, "required": ["a>b"]}
    async with surface() as server:
        asked = {"messages": HI, "tools": [tool("weather", schema)]}
        refused = await server.post(CHAT, asked | {"tool_choice": "required"})
        free = await server.post(CHAT, asked)
        assert len(server.fleet.generations) == 1
    assert (refused.status, free.status) == (400, 200)
    assert refused.error["param"] == "tools"
    assert '"a>b"' in refused.error["message"]
