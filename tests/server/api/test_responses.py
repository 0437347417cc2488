"""Tests of POST /v1/responses: order of events, response format, and refused requests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from server.api.openai.responses_events import (
    ResponseEvents,
    message_frame,
    response_head,
    sse_frame,
)
from server.api.openai.responses_schema import ResponseRequest
from server.api.schemas import read_request
from server.contract.generation import (
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Usage,
)
from tests.server.api.test_messages import NESTED
from tests.server.support.fakes import FakeFleet, delta, saying
from tests.server.support.surface import CONFIG, MODEL, posted, refused_at, surface
from triolet.errors import no_worker
from triolet.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.contract.generation import Event
    from tests.server.support.surface import Answer

PATH = "/v1/responses"
TEXT = "response.output_text"
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    f"{TEXT}.delta",
    f"{TEXT}.delta",
    f"{TEXT}.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Tell the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def ask(**more: object) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", **more}


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """Return the events of a stream. Their SSE names must equal their types."""
    named = answer.named_events
    assert [name for name, _ in named] == [event["type"] for _, event in named]
    return [event for _, event in named]


def events(framing: Callable[[bytes, bytes], bytes], lane: str | None = None) -> ResponseEvents:
    fields = read_request(ResponseRequest, ask())
    request = GenerationRequest(b"\0" * 16, (1, 2), SamplingParams(), 1.0)
    head = response_head("resp_00", fields, request, CONFIG.model_name)
    return ResponseEvents(head, fields, framing, stream_id=lane)


def test_events_come_in_order_and_each_end_is_one() -> None:
    usage = Usage(2, 5)
    ends: dict[str, Event] = {
        "response.completed": Finished(FinishReason.STOP, usage),
        "response.incomplete": Finished(FinishReason.LENGTH, usage),
        "response.failed": Failed(no_worker("gone"), usage),
    }
    for last, end in ends.items():
        form = events(sse_frame)
        frames = [*form.begin(), *form.event(0, delta("Hello")), *form.event(0, delta(" there"))]
        written = b"".join([*frames, *form.event(0, end)])
        kinds = [
            line.removeprefix("event: ")
            for line in written.decode().split("\n")
            if line.startswith("event: ")
        ]
        middle = ORDER[:6] if last == "response.failed" else ORDER[:-1]
        assert kinds == [*middle, last]
        assert form.end() == []


def test_part_of_a_character_is_no_event_and_takes_no_number() -> None:
    form = events(message_frame, "lane")
    frames = form.begin()
    assert form.event(0, delta("")) == []
    (frame,) = form.event(0, delta("x"))
    assert b'"sequence_number":%d,' % len(frames) in frame
    assert frame.endswith(b'"stream_id":"lane"}')


def test_a_cancel_is_no_failure_but_an_end_with_what_was_said() -> None:
    form = events(message_frame)
    form.event(0, delta("so far"))
    form.is_stopped = True
    frames = form.event(0, Failed(no_worker("ended"), Usage(2, 1)))
    assert b'"status":"cancelled"' in frames[-1]
    assert b'"text":"so far"' in frames[-1]
    assert form.response["status"] == "cancelled"
    assert not form.have_failed


async def test_a_stream_is_named_and_numbered_events() -> None:
    events = events_of(await posted(PATH, ask(stream=True)))
    assert [event["type"] for event in events] == ORDER
    assert [event["sequence_number"] for event in events] == list(range(len(ORDER)))
    assert all("stream_id" not in event for event in events)
    last = events[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == "Hello there"
    assert last["usage"]["output_tokens"] == len("Hello there")


async def test_a_whole_answer_is_the_last_event_of_a_stream() -> None:
    asked = ask(instructions="be kind", max_output_tokens=20, temperature=0.5)
    async with surface() as server:
        whole = (await server.post(PATH, asked)).json
        events = events_of(await server.post(PATH, {**asked, "stream": True}))
    streamed = events[-1]["response"]
    for of_one in ("id", "created_at"):
        assert whole.pop(of_one)
        del streamed[of_one]
    whole["output"][0].pop("id")
    streamed["output"][0].pop("id")
    assert whole == streamed
    assert whole["instructions"] == "be kind"
    assert (whole["max_output_tokens"], whole["temperature"]) == (20, 0.5)
    request = server.fleet.generations[0].request
    assert bytes(request.prompt_ids) == b"system: be kind\nuser: hi\nassistant:"


async def test_the_length_limit_is_a_detail_of_an_incomplete_response() -> None:
    whole = (
        await posted(PATH, ask(), fleet=FakeFleet(saying("cut", reason=FinishReason.LENGTH)))
    ).json
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_logprobs_come_where_they_are_asked_for() -> None:
    asked = ask(include=["message.output_text.logprobs"], top_logprobs=1)
    async with surface() as server:
        whole = (await server.post(PATH, asked)).json
        without = (await server.post(PATH, ask(include=["reasoning.encrypted_content"]))).json
    scored = whole["output"][0]["content"][0]["logprobs"]
    assert "".join(token["token"] for token in scored) == "Hello there"
    assert scored[0]["top_logprobs"][0]["token"] == "H"
    assert whole["top_logprobs"] == 1
    assert without["output"][0]["content"][0]["logprobs"] == []


async def test_metadata_come_back_as_they_were_sent_also_in_events() -> None:
    noted = {"trip": "to the moon", "é": ""}
    async with surface() as server:
        whole = (await server.post(PATH, ask(metadata=noted))).json
        without = (await server.post(PATH, ask())).json
        stream = (await server.post(PATH, ask(metadata=noted, stream=True))).named_events
        too_many = await server.post(PATH, ask(metadata={str(n): "" for n in range(17)}))
    assert whole["metadata"] == noted
    assert without["metadata"] == {}
    assert [event["response"]["metadata"] for _, event in (stream[0], stream[-1])] == [noted] * 2
    assert (too_many.status, too_many.error["param"]) == (400, "metadata")


async def test_the_text_may_have_to_follow_a_schema_and_the_response_repeats_it() -> None:
    schema = {"type": "array", "items": {"type": "object"}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    async with surface() as server:
        whole = (await server.post(PATH, ask(text={"format": form, "verbosity": "low"}))).json
        plain = (await server.post(PATH, ask(text={"format": {"type": "json_object"}}))).json
    assert whole["text"] == {"format": form}
    assert plain["text"] == {"format": {"type": "json_object"}}
    first, second = (g.request.sampling.grammar for g in server.fleet.generations)
    assert first is not None
    assert second is not None
    assert json.loads(first.text) == {
        "type": "array",
        "items": {"type": "object", "additionalProperties": False},
    }
    assert json.loads(second.text) == {"type": "object"}


call = saying("Let me see. ", CALL[:30], CALL[30:45], CALL[45:])


async def test_calls_of_tools_are_items_whole_and_streamed() -> None:
    async with surface(FakeFleet(call)) as server:
        whole = (await server.post(PATH, ask(tools=[WEATHER]))).json
        events = events_of(await server.post(PATH, ask(tools=[WEATHER], stream=True)))
    said, called = whole["output"]
    assert said["content"][0]["text"] == "Let me see. "
    assert (called["type"], called["name"]) == ("function_call", "weather")
    assert json.loads(called["arguments"]) == {"city": "Rome"}
    assert called["call_id"].startswith("call_")
    assert whole["tools"] == [WEATHER]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events if not event["type"].endswith(".delta")]
    assert kinds == [
        *ORDER[:4],
        *ORDER[6:9],
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    parts = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert json.loads("".join(parts)) == {"city": "Rome"}
    assert {e["output_index"] for e in events if "arguments" in e["type"]} == {1}
    last = events[-1]["response"]["output"]
    assert [item["type"] for item in last] == ["message", "function_call"]
    assert last[1] == events[-2]["item"]


async def test_items_of_calls_are_turns_of_a_chat() -> None:
    items = [
        {"role": "user", "content": "How is it in Rome?"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "a",
            "name": "weather",
            "arguments": '{"city": "Rome"}',
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "a", "output": "warm"},
    ]
    called = {"name": "weather", "arguments": '{"city": "Rome"}'}
    same = [
        items[0],
        {
            "role": "assistant",
            "content": "Wait.",
            "tool_calls": [{"id": "a", "type": "function", "function": called}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "warm"},
    ]
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    asked = ask(input=items, tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
    chat = {
        "messages": same,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    async with surface() as server:
        whole = await server.post(PATH, asked)
        assert (await server.post("/v1/chat/completions", chat)).status == 200
    assert whole.json["tool_choice"] == {"type": "function", "name": "weather"}
    first, second = (generation.request for generation in server.fleet.generations)
    assert first.prompt_ids == second.prompt_ids
    assert first.sampling.grammar == second.sampling.grammar
    assert first.sampling.grammar is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_warming_computes_the_prompt_and_says_nothing(stream: bool) -> None:
    asked = ask(prompt_cache_options={"prewarm": True}, stream=stream)
    async with surface() as server:
        answer = await server.post(PATH, asked)
        response = events_of(answer)[-1]["response"] if stream else answer.json
    assert (response["status"], response["output"]) == ("completed", [])
    assert (response["usage"]["output_tokens"], response["usage"]["input_tokens"]) == (0, 19)
    assert server.fleet.generations[0].request.sampling.max_tokens == 1


async def test_what_changes_no_promise_is_accepted() -> None:
    ignored = {
        "metadata": {"a": "b"},
        "user": "me",
        "safety_identifier": "me",
        "service_tier": "auto",
        "reasoning": {"effort": "low"},
        "prompt_cache_key": "k",
        "parallel_tool_calls": False,
        "image": {"context_compression": "auto"},
        "store": False,
        "background": False,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tools": [],
        "tool_choice": "auto",
    }
    assert (await posted(PATH, ask(**ignored))).status == 200


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"generate": False}, "generate"),
        ({"stream_id": "a"}, "stream_id"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "input"),
        ({"min_tokens": 9, "max_output_tokens": 8}, "min_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input.0"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input.0.type"),
        ({"store": True}, "store"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": NESTED}}},
            "text.format.schema",
        ),
        ({"tools": [{"type": "code_interpreter"}]}, "tools.0.type"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [{**WEATHER, "strict": True, "parameters": NESTED}]}, "tools.0.parameters"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"temperature": True}, "temperature"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_is_refused_is_named(change: dict[str, Any], param: str) -> None:
    answer = await refused_at(PATH, ask(**change))
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_reasoning_in_the_history_is_taken_and_not_shown_to_the_model() -> None:
    reasoning = [
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "reasoning",
            "id": "rs_2",
            "summary": [{"type": "summary_text", "text": "Far."}],
            "content": [{"type": "reasoning_text", "text": "It is far."}],
            "encrypted_content": "c2VjcmV0",
            "status": "completed",
        },
    ]
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    more = {"role": "user", "content": "So?"}
    async with surface() as server:
        thought = [turns[0], *reasoning, turns[1], more]
        assert (await server.post(PATH, ask(input=thought))).status == 200
        assert (await server.post(PATH, ask(input=[*turns, more]))).status == 200
        nothing = await server.post(PATH, ask(input=reasoning))
    first, second = (generation.request for generation in server.fleet.generations)
    assert first.prompt_ids == second.prompt_ids
    assert (nothing.status, nothing.error["param"]) == (400, "input")


async def test_an_unknown_model_is_404_and_a_stored_response_is_nowhere() -> None:
    async with surface() as server:
        assert (await server.post(PATH, ask(model="nobody"))).error["code"] == "model_not_found"
        stored = await server.request("GET", f"{PATH}/resp_1")
        listed = await server.request("GET", PATH)
    assert stored.status == 404
    assert "stores no responses" in stored.error["message"]
    assert (listed.status, listed.headers["allow"]) == (405, "POST")
