"""Tests of tool calls over each API with a model whose chat template has no tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from server.contract.generation import FinishReason
from tests.server.support.fakes import FakeFleet
from tests.server.support.surface import MODEL, surface
from tests.server.text.tool_cases import hermes
from tests.server.tiny_text import PAD_ID, tiny_text, tiny_tokenizer
from triolet.grammar import build_tokenizer, compile_grammar

from .test_cut_tools import (
    ASKS,
    CHAT,
    FIRST,
    HI,
    MESSAGES,
    OLLAMA,
    READERS,
    RESPONSES,
    SECOND,
    TOLD,
    in_pieces,
    of_chat,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.support.surface import Answer
    from triolet.sampling import Grammar

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}},
    "required": ["city"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
BODY = {"messages": HI, "tools": [WEATHER]}
BOTH = hermes(FIRST, SECOND)
LONG = BOTH.replace("Bonn", "Bonn am Rhein")
ENDS = {CHAT: "tool_calls", MESSAGES: "tool_use", RESPONSES: "completed", OLLAMA: "stop"}
TOKENS = build_tokenizer(tiny_tokenizer().to_str(), (PAD_ID,))


def accepts(grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None
    matcher = compile_grammar(TOKENS, grammar)
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(("path", "is_streamed", "read", "_"), READERS)
async def test_calls_come_as_the_calls_of_each_api(
    path: str,
    is_streamed: bool,
    read: Callable[[Answer], tuple[str, list[str], str]],
    _: str,
) -> None:
    fleet = FakeFleet(in_pieces(f"Hm. {BOTH}", FinishReason.STOP))
    text = tiny_text()
    async with surface(fleet, text=text) as server:
        answer = await server.post(path, {**ASKS[path], "stream": is_streamed})
        prompt = await text.decode(fleet.generations[0].request.prompt_ids)
        shown = (await server.post("/api/show", {"model": MODEL})).json
    said, told, end = read(answer)
    assert (said.strip(), told, end) == ("Hm.", TOLD, ENDS[path])
    assert "tools" in shown["capabilities"]
    assert prompt.startswith("[system]# Tools")
    assert prompt.endswith("[user]hi[assistant]")
    assert '{"name": "weather"' in prompt


async def test_the_model_may_answer_and_each_call_keeps_to_its_schema() -> None:
    async with surface(text=tiny_text()) as server:
        for choice in ("auto", "required", {"type": "function", "function": {"name": "weather"}}):
            answer = await server.post(CHAT, BODY | {"tool_choice": choice})
            assert answer.status == 200, answer
        auto, required, named = (
            generation.request.sampling.grammar for generation in server.fleet.generations
        )
    one = hermes(FIRST)
    for grammar in (auto, required, named):
        assert accepts(grammar, one)
        assert not accepts(grammar, LONG)
        assert not accepts(grammar, one.replace("weather", "whether"))
        assert not accepts(grammar, one.removesuffix("</tool_call>"))
    assert accepts(auto, "Hello <b> {")
    assert accepts(auto, f"I look. {BOTH}")
    assert accepts(required, BOTH)
    assert not accepts(required, "Hello")
    assert not accepts(named, BOTH)


async def test_without_a_choice_of_tools_the_prompt_has_none() -> None:
    text = tiny_text()
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": TOLD[0]}}
    past = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    async with surface(text=text) as server:
        for more in ({"tool_choice": "none"}, {"tools": None}):
            assert (await server.post(CHAT, BODY | {"messages": past} | more)).status == 200
        requests = [generation.request for generation in server.fleet.generations]
        prompts = [await text.decode(request.prompt_ids) for request in requests]
    shown = "<tool_response>\nrain\n</tool_response>"
    assert prompts == [f"[user]hi[assistant]{hermes(FIRST)}[user]{shown}[assistant]"] * 2
    assert [request.sampling.grammar for request in requests] == [None, None]


async def test_an_answer_that_has_to_have_a_form_has_it() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}
    async with surface(text=tiny_text()) as server:
        for more in ({}, {"tool_choice": "required"}):
            await server.post(CHAT, BODY | {"response_format": form} | more)
        answer, call = (g.request.sampling.grammar for g in server.fleet.generations)
    assert answer is not None
    assert '"city"' in answer.text
    assert "tool_call" not in answer.text
    assert accepts(call, BOTH)


async def test_an_answer_that_ends_within_a_call_is_no_text() -> None:
    async with surface(text=tiny_text()) as server:
        for cut in (BOTH.index("{"), BOTH.index("ther"), BOTH.index("nn")):
            server.fleet.script = in_pieces(BOTH[:cut])
            said, told, reason = of_chat(await server.post(CHAT, BODY))
            assert (said, reason) == ("", "length")
            assert all(TOLD[0].startswith(one) and one != TOLD[0] for one in told)


@pytest.mark.parametrize(
    ("template", "told"), [("{{ tools }}", "native"), ("", "generic")], ids=["native", "generic"]
)
async def test_a_model_says_how_it_is_told_of_tools(template: str, told: str) -> None:
    text = tiny_text(template=f"{template}{{{{ messages[0].content }}}}")
    async with surface(text=text) as server:
        (card,) = (await server.request("GET", "/v1/models")).json["data"]
        one = (await server.request("GET", f"/v1/models/{MODEL}")).json
    assert card["tools"] == one["tools"] == told


async def test_a_schema_that_no_grammar_can_hold_is_refused_by_name() -> None:
    async with surface(text=tiny_text()) as server:
        tools = [{"name": "f", "input_schema": {"a": "x" * 70_000}}]
        answer = await server.post(MESSAGES, ASKS[MESSAGES] | {"tools": tools})
    assert answer.status == 400
    assert "bytes; at most" in answer.json["error"]["message"]
