"""Tests that request bodies that take long to parse do not block the event loop, which also sends
heartbeats."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from server.api.anthropic import schema
from server.api.body import INLINE_BYTES, read_checked
from server.api.constraints import plan_tools
from server.api.json_body import MAX_KEYS, parse_object
from server.api.ollama import chat as ollama
from server.api.openai import responses
from server.api.openai.chat import turns
from server.api.schemas import (
    MAX_DETOKENIZED,
    MAX_PARTS,
    TURNS_AT_ONCE,
    ChatRequest,
    Message,
    StrictModel,
    read_request,
)
from tests.server.support.held_work import held_work
from tests.server.support.surface import (
    MODEL,
    PATIENCE_S,
    Answer,
    Surface,
    posted,
    requested,
    surface,
)
from triolet.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SPACE = " " * INLINE_BYTES


@asynccontextmanager
async def another_task() -> AsyncIterator[Callable[[], int]]:
    """Run an idle task; yield a function that returns its number of steps."""
    done = 0

    async def count_steps() -> None:
        nonlocal done
        while True:
            await trio.lowlevel.checkpoint()
            done += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count_steps)
        await trio.lowlevel.checkpoint()
        yield lambda: done
        nursery.cancel_scope.cancel()


async def test_a_large_body_is_parsed_elsewhere_and_a_small_one_at_once() -> None:
    async with (
        held_work() as held,
        surface(do=held.do) as server,
        trio.open_nursery() as nursery,
    ):
        answers: list[Answer] = []

        async def post_large() -> None:
            body = json.dumps({"prompt": "A"}).encode() + SPACE.encode()
            answers.append(await server.request("POST", "/tokenize", body=body))

        nursery.start_soon(post_large)
        with trio.fail_after(PATIENCE_S):
            while not held.turns.num_running:
                await trio.lowlevel.checkpoint()
        small = await server.post("/tokenize", {"prompt": "A"})
        assert (small.status, answers) == (200, [])
        held.let_all_go()
    assert [answer.json["tokens"] for answer in answers] == [[65]]


async def test_a_large_body_that_waits_too_long_is_refused() -> None:
    body = b"{}" + SPACE.encode()
    answers: list[Answer] = []

    async def post(server: Surface) -> None:
        answers.append(await server.request("POST", "/tokenize", body=body))

    async with held_work(text_timeout_s=0.05) as held, surface(do=held.do) as server:
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(post, server)
        held.let_all_go()
    assert sorted(answer.status for answer in answers) == [400, 503], "one was started, one was not"
    [refused] = [answer for answer in answers if answer.status == 503]
    assert refused.error["code"] == "overloaded"
    assert int(refused.headers["retry-after"]) >= 1


def test_an_object_with_very_many_keys_is_refused() -> None:
    most = {str(i): i for i in range(MAX_KEYS)}
    assert parse_object(json.dumps(most).encode()) == most
    with pytest.raises(RequestError, match=f"more than {MAX_KEYS} keys"):
        parse_object(json.dumps({"a": most | {"one": "more"}}).encode())


@pytest.mark.parametrize(
    "tokens", [5, ["a"], [-1] * 1000, [True], [2**31]], ids=["int", "text", "low", "bool", "high"]
)
async def test_bad_ids_make_one_error_that_names_the_list(tokens: object) -> None:
    answer = await posted("/detokenize", {"tokens": tokens})
    assert (answer.status, answer.error["param"]) == (400, "tokens")


async def test_more_ids_than_one_request_may_hold_are_refused() -> None:
    body = b'{"tokens":[' + b"1," * MAX_DETOKENIZED + b"1]}"
    answer = await requested("POST", "/detokenize", body=body)
    assert (answer.status, answer.error["param"]) == (400, "tokens")


async def test_no_more_ids_than_a_context_holds_become_text_at_once() -> None:
    async with surface() as server:
        most = server.services.models.first.fleet.max_model_len
        taken, refused = [
            await server.post("/detokenize", {"tokens": [97] * count}) for count in (most, most + 1)
        ]
    assert (taken.status, taken.json["prompt"]) == (200, "a" * most)
    assert (refused.status, refused.error["param"]) == (400, "tokens")
    assert f"a context holds ({most})" in refused.error["message"]


async def test_schemas_of_tools_are_gone_through_one_by_one() -> None:
    names = [f"f{number}" for number in range(100)]
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "max_tokens": 1}
    fields = read_request(ChatRequest, asked | {"tool_choice": "required"})
    async with surface() as server, another_task() as steps:
        before = steps()
        await plan_tools(fields, server.services.models.first)
        assert steps() - before >= len(names)


async def test_tools_beyond_the_bound_of_a_grammar_are_refused_at_once() -> None:
    schema = {"type": "object", "properties": {"a" * 10_000: {"type": "string"}}}
    function = {"parameters": schema}
    tools = [
        {"type": "function", "function": function | {"name": f"f{number}"}} for number in range(20)
    ]
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
    async with surface() as server:
        answer = await server.post("/v1/chat/completions", asked | {"tool_choice": "required"})
        assert not server.grammars.checked
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert "too large in total" in answer.error["message"]


async def test_a_message_in_very_many_parts_is_refused_by_their_number() -> None:
    parts = [{"type": "text", "text": "a"}] * MAX_PARTS
    taken, refused = [
        await posted("/tokenize", {"messages": [{"role": "user", "content": content}]})
        for content in (parts, [*parts, parts[0]])
    ]
    assert taken.status == 200
    assert (refused.status, refused.error["param"]) == (400, "messages.0.content")
    assert f"at most {MAX_PARTS} parts" in refused.error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses/input_tokens", lambda turns: {"input": turns}),
        ("/v1/messages/count_tokens", lambda turns: {"messages": turns}),
        ("/api/chat", lambda turns: {"model": MODEL, "messages": turns, "stream": False}),
    ],
    ids=["responses", "messages", "ollama"],
)
async def test_a_long_conversation_is_put_into_other_words_some_turns_at_a_time(
    path: str, body: Callable[[list[Any]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 500
    turns.append(turns[0])
    made: list[int] = []

    class Counted(Message):
        def __init__(self, **fields: Any) -> None:  # noqa: ANN401
            made.append(steps())
            super().__init__(**fields)

    def constructed(_fields_set: object = None, **fields: Any) -> Message:  # noqa: ANN401
        made.append(steps())
        return Message.model_construct(**fields)

    Counted.model_construct = constructed  # type: ignore[method-assign,assignment]
    for module in (responses, schema, ollama):
        monkeypatch.setattr(module, "Message", Counted)

    async with surface() as server, another_task() as steps:
        await server.request("POST", path, body=json.dumps(body(turns)).encode())
    at_once = Counter(made)
    assert sum(at_once.values()) >= len(turns)
    # Trio runs the tasks of a turn in any order: two slices may see the same step.
    assert max(at_once.values()) <= 2 * TURNS_AT_ONCE


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("ChatRequest", "messages"),
        ("OllamaChat", "messages"),
        ("MessagesRequest", "messages"),
        ("ResponseRequest", "input"),
    ],
)
async def test_a_long_conversation_that_has_been_checked_is_read_some_turns_at_a_time(
    kind: str, name: str
) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(4 * TURNS_AT_ONCE + 1)]
    asked = {"model": "m", name: items} | ({"max_tokens": 5} if kind == "MessagesRequest" else {})
    async with another_task() as steps:
        before = steps()
        read = await read_checked(StrictModel.kinds[kind], asked)
        assert steps() - before >= 4 - 1, "no step follows the last slice"
    assert read == read_request(StrictModel.kinds[kind], asked)


async def test_a_long_conversation_becomes_a_templates_words_some_turns_at_a_time() -> None:
    messages = [Message(role="user", content="a")] * (4 * TURNS_AT_ONCE)
    async with another_task() as steps:
        before = steps()
        assert len(await turns(messages)) == len(messages)
        assert steps() - before >= 4 - 1
