"""Tests of POST /v1/messages: order of events, stop reasons, usage, and the format of errors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from server.api.anthropic.messages import MessageStream, message_error
from server.contract.generation import (
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Usage,
)
from tests.server.support.fakes import (
    MAX_MODEL_LEN,
    FakeFleet,
    delta,
    saying,
)
from tests.server.support.surface import (
    MODEL,
    asked_of,
    named_sse_events,
    posted,
    refused_at,
    surface,
)
from triolet.errors import RequestError, deadline_exceeded, no_worker, overloaded
from triolet.sampling import SamplingParams

if TYPE_CHECKING:
    from server.contract.generation import Event
    from tests.server.support.surface import Answer

CHAT = "/v1/chat/completions"
PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
ORDER = [
    "message_start",
    "ping",
    "content_block_start",
    "content_block_delta",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
]


NESTED: dict[str, Any] = {}
"""Nested deeper than any schema may be."""
for _ in range(50):
    NESTED = {"items": NESTED}


WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Tell the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def ask(**more: object) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "hi"}],
        **more,
    }


def error_of(answer: Answer) -> dict[str, Any]:
    """Return an error, which must have this API's format."""
    document = answer.json
    assert document["type"] == "error"
    assert document["request_id"] == answer.headers["request-id"]
    error: dict[str, Any] = document["error"]
    assert set(error) == {"type", "message"}
    return error


def stream_of(*events: Event, max_tokens: int = 10) -> list[tuple[str, Any]]:
    request = GenerationRequest(b"\0" * 16, (1, 2, 3), SamplingParams(), 1.0)
    form = MessageStream(request, "msg_00", MODEL, max_tokens, "req")
    frames = [*form.begin(), *(frame for event in events for frame in form.event(0, event))]
    return named_sse_events(b"".join([*frames, *form.end()]))


def test_events_come_in_order_under_their_names() -> None:
    end = Finished(FinishReason.STOP, Usage(3, 5, cached_tokens=2))
    events = stream_of(delta("Hel"), delta(""), delta("lo"), end)
    assert [name for name, _ in events] == ORDER
    assert all(data["type"] == name for name, data in events)
    by_name = dict(events)
    start = by_name["message_start"]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"] == {"input_tokens": 3, "output_tokens": 0}
    assert by_name["content_block_start"]["content_block"] == {"type": "text", "text": ""}
    assert {data["index"] for name, data in events if name.startswith("content")} == {0}
    assert by_name["message_delta"]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert by_name["message_delta"]["usage"] == {
        "input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 5,
    }


def test_an_answer_without_text_has_no_block() -> None:
    events = stream_of(Finished(FinishReason.STOP, Usage(3, 1)))
    assert [name for name, _ in events] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (Finished(FinishReason.STOP, Usage(3, 5)), "end_turn"),
        (Finished(FinishReason.STOP, Usage(3, 5), "END"), "stop_sequence"),
        (Finished(FinishReason.LENGTH, Usage(3, 10)), "max_tokens"),
        (Finished(FinishReason.LENGTH, Usage(3, 9)), "model_context_window_exceeded"),
    ],
)
def test_ends_have_their_names(end: Finished, reason: str) -> None:
    (_, data) = stream_of(delta("x"), end)[-2]
    assert data["delta"] == {"stop_reason": reason, "stop_sequence": end.stop_string}


def test_a_failure_ends_a_stream_in_the_form_of_errors() -> None:
    name, data = stream_of(delta("x"), Failed(no_worker("gone"), Usage(3, 1)))[-1]
    assert name == "error"
    assert data == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "gone"},
        "request_id": "req",
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_every_status_has_its_type(status: int, kind: str) -> None:
    error = RequestError("is wrong", status=status, code="c", param="top_k")
    assert message_error(error, "r")["error"] == {"type": kind, "message": "top_k: is wrong"}


async def test_whole_and_streamed_are_one_message() -> None:
    async with surface() as server:
        whole = await server.post(PATH, ask())
        events = (await server.post(PATH, ask(stream=True))).named_events
    assert [name for name, _ in events] == ORDER
    message = whole.json
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hello there"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len("user: hi\nassistant:"),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": len("Hello there"),
        },
    }
    assert whole.headers["request-id"] == whole.headers["x-request-id"]


async def test_every_parameter_reaches_the_generation() -> None:
    asked = ask(
        system=[{"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "kind."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "one"}]},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "three"},
        ],
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stop_sequences=["END", "STOP"],
        seed=5,
        ignore_eos=True,
        priority=-1,
    )  # fmt: skip
    request = await asked_of(PATH, asked)
    assert bytes(request.prompt_ids) == (
        b"system: Be kind.\nuser: one\nassistant: two\nuser: three\nassistant:"
    )
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.9)
    assert (sampling.top_k, sampling.seed, sampling.ignore_eos) == (40, 5, True)
    assert (request.stop, request.priority) == (("END", "STOP"), -1)


async def test_the_output_may_have_to_follow_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    request = await asked_of(PATH, ask(output_config={"format": form}))
    grammar = request.sampling.grammar
    assert grammar is not None
    assert json.loads(grammar.text) == schema | {"additionalProperties": False}


async def test_words_of_the_assistant_at_the_end_are_gone_on_with() -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once upon"}]
    request = await asked_of(PATH, ask(messages=turns))
    prompt = bytes(request.prompt_ids)
    assert prompt == b"user: hi\nassistant: Once upon"


async def test_a_prompt_beyond_the_context_is_refused_as_in_a_chat() -> None:
    async with surface() as server:
        chat = {"messages": [{"role": "user", "content": "x" * MAX_MODEL_LEN}], "max_tokens": 5}
        answer = await server.post(PATH, chat)
        of_chat = await server.post(CHAT, chat)
        assert (answer.status, of_chat.status) == (400, 400)
        assert error_of(answer)["message"] == f"messages: {of_chat.error['message']}"
        assert not server.fleet.generations


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_at_all_warm_the_prefix_cache(stream: bool) -> None:
    async with surface() as server:
        answer = await server.post(PATH, ask(max_tokens=0, stream=stream))
        if stream:
            assert [name for name, _ in answer.named_events][2:] == [
                "message_delta",
                "message_stop",
            ]
            end = answer.named_events[2][1]
            stop_reason, usage = end["delta"]["stop_reason"], end["usage"]
        else:
            assert answer.json["content"] == []
            stop_reason, usage = answer.json["stop_reason"], answer.json["usage"]
    assert (stop_reason, usage["output_tokens"]) == ("max_tokens", 0)
    assert server.fleet.generations[0].request.sampling.max_tokens == 1


async def test_what_changes_no_promise_is_accepted() -> None:
    ignored = {
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "thinking": {"type": "disabled"},
        "inference_geo": "eu",
        "speed": "standard",
        "output_config": {"effort": "low"},
        "tools": [],
        "tool_choice": {"type": "auto"},
    }
    assert (await posted(PATH, ask(**ignored))).status == 200


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content",
        ),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
        ({"system": 5}, "system"),
        ({"stop": ["x"]}, "stop:"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"container": "c"}, "container"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.schema",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": NESTED}}},
            "output_config.format.schema",
        ),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        (
            {"tools": [{**WEATHER, "strict": True, "input_schema": NESTED}]},
            "tools.0.input_schema",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
            "messages.0.content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages.0.content",
        ),
        ({"n": 2}, "n:"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_is_refused_is_named(change: dict[str, Any], param: str) -> None:
    body = {name: value for name, value in ask(**change).items() if value is not None}
    answer = await refused_at(PATH, body)
    error = error_of(answer)
    assert (answer.status, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(param)


async def test_errors_of_every_kind_have_the_form() -> None:
    fleet = FakeFleet()
    async with surface(fleet) as server:
        unknown = await server.post(PATH, ask(model="nobody"))
        nowhere = await server.post(f"{PATH}/batches", {})
        no_json = await server.request("POST", PATH, body=b"{")
        fleet.refuse_with = overloaded("busy", 1.0)
        busy = await server.post(PATH, ask(stream=True))
        fleet.refuse_with = None
        fleet.script = lambda generation: generation.fail(deadline_exceeded("late"))
        late = await server.post(PATH, ask())
    answers = (unknown, nowhere, no_json, busy, late)
    assert [(answer.status, error_of(answer)["type"]) for answer in answers] == [
        (404, "not_found_error"),
        (404, "not_found_error"),
        (400, "invalid_request_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ]
    assert busy.headers["retry-after"]


async def test_what_is_counted_is_what_is_sent() -> None:
    prompt = {name: ask(system="Be kind.")[name] for name in ("model", "messages", "system")}
    async with surface() as server:
        counted = await server.post(COUNT, prompt)
        answered = await server.post(PATH, {**prompt, "max_tokens": 1})
        refused = await server.post(COUNT, ask())
    assert counted.json == {"input_tokens": answered.json["usage"]["input_tokens"]}
    assert error_of(refused)["message"].startswith("max_tokens:")


async def test_a_stop_sequence_is_named() -> None:
    message = (
        await posted(PATH, ask(stop_sequences=["END"]), fleet=FakeFleet(saying("so ", stop="END")))
    ).json
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
