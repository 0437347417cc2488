"""Tests of the WebSocket of the Responses API: lanes, cancels, refusals, and every way to end."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from server.contract.generation import CancelReason, FinishReason
from tests.server.support.fakes import FakeFleet, by_hand, saying
from tests.server.support.surface import MODEL, PATIENCE_S, surface
from tests.server.support.websocket import BINARY, PING, TEXT, Socket, frame_bytes, open_socket
from triolet.errors import no_worker, overloaded


def create(**more: object) -> dict[str, Any]:
    return {"type": "response.create", "model": MODEL, "input": "hi", **more}


async def refused(socket: Socket, message: dict[str, Any] | str) -> dict[str, Any]:
    await socket.send(message)
    event = await socket.event()
    assert event["type"] == "error"
    assert set(event["error"]) == {"message", "type", "param", "code"}
    return event


async def test_an_answer_is_one_message_with_numbered_events() -> None:
    async with surface() as server, await open_socket(server) as socket:
        events = await socket.answer(create(instructions="be kind", max_output_tokens=9))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert all("stream_id" not in event for event in events)
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["usage"], first["output"]) == ("in_progress", None, [])
    (item,) = last["output"]
    assert item["content"][0]["text"] == "Hello there"
    assert last["status"] == item["status"] == "completed"
    assert last["max_output_tokens"] == 9
    assert last["usage"]["output_tokens"] == len("Hello there")
    assert last["usage"]["total_tokens"] == last["usage"]["input_tokens"] + len("Hello there")
    deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert deltas == ["Hello", " there"]
    assert [event["text"] for event in events if event["type"].endswith("text.done")] == [
        "Hello there"
    ]
    (generation,) = server.fleet.generations
    assert bytes(generation.request.prompt_ids) == b"system: be kind\nuser: hi\nassistant:"


async def test_the_length_limit_makes_it_incomplete() -> None:
    async with (
        surface(FakeFleet(saying("cut", reason=FinishReason.LENGTH))) as server,
        await open_socket(server) as socket,
    ):
        last = await socket.response(create(), "response.incomplete")
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["output"][0]["status"] == last["status"] == "incomplete"


async def test_a_failure_is_one_terminal_event() -> None:
    async with (
        surface(FakeFleet(saying("half", error=no_worker("the worker died")))) as server,
        await open_socket(server) as socket,
    ):
        last = await socket.response(create(), "response.failed")
        again = await refused(socket, create(previous_response_id=last["id"]))
    assert last["status"] == "failed"
    assert last["error"] == {
        "code": "server_error",
        "type": "no_worker",
        "message": "the worker died",
        "param": None,
    }
    assert again["error"]["code"] == "previous_response_not_found"


async def test_a_refused_submission_is_an_error_and_the_socket_lives() -> None:
    fleet = FakeFleet()
    async with surface(fleet) as server, await open_socket(server) as socket:
        fleet.refuse_with = overloaded("busy", 1.0)
        event = await refused(socket, create(stream_id="lane-1"))
        assert (event["status"], event["stream_id"]) == (503, "lane-1")
        fleet.refuse_with = None
        await socket.answer(create())


@pytest.mark.parametrize("by", ["response_id", "lane", "default lane"])
async def test_a_cancel_ends_the_answer_with_what_was_said(by: str) -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet) as server, await open_socket(server) as socket:
        await socket.send(create(**({"stream_id": "a"} if by == "lane" else {})))
        generation = await fleet.nth(0)
        generation.say("so far")
        response_id = (await socket.event())["response"]["id"]
        await socket.until("response.output_text.delta")
        target: dict[str, str] = {}
        if by == "response_id":
            target = {"response_id": response_id}
        elif by == "lane":
            target = {"stream_id": "a"}
        last = await socket.response({"type": "response.cancel", **target}, "response.incomplete")
        # Crossing messages are not an error: the next event is of the next answer.
        await socket.send({"type": "response.cancel", "response_id": response_id})
        fleet.script = lambda generation: generation.finish()
        await socket.send(create())
        assert (await socket.event())["type"] == "response.created"
    assert generation.cancelled[0] is CancelReason.STOPPED
    assert last["status"] == "cancelled"
    assert last["output"][0]["content"][0]["text"] == "so far"


async def test_answers_of_one_lane_queue_and_lanes_run_side_by_side() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet) as server, await open_socket(server) as socket:
        for lane in ("a", "a", "b"):
            await socket.send(create(stream_id=lane))
        first, second = await fleet.nth(0), await fleet.nth(1)
        created = [e for e in [await socket.event() for _ in range(8)] if "response" in e]
        assert {event["stream_id"] for event in created} == {"a", "b"}
        assert len(fleet.generations) == 2
        by_lane = {"a": first, "b": second}
        by_lane["b"].finish()
        assert (await socket.until("response.completed"))[-1]["stream_id"] == "b"
        by_lane["a"].finish()
        assert (await socket.until("response.completed"))[-1]["stream_id"] == "a"
        (await fleet.nth(2)).finish()
        assert (await socket.until("response.completed"))[-1]["stream_id"] == "a"


async def test_answers_at_once_and_waiting_are_bounded() -> None:
    fleet = FakeFleet(by_hand)
    async with (
        surface(fleet, ws_max_streams=2, ws_max_queued=1) as server,
        await open_socket(server) as socket,
    ):
        for lane in ("a", "b", "c"):
            await socket.send(create(stream_id=lane))
        await fleet.nth(1)
        await socket.send(create(stream_id="d"))
        event = await socket.event()
        while event["type"] != "error":
            event = await socket.event()
        assert (event["status"], event["stream_id"]) == (429, "d")
        assert event["error"]["code"] == "websocket_stream_limit_reached"
        assert len(fleet.generations) == 2
        fleet.generations[0].finish()
        await fleet.nth(2)


async def test_a_conversation_goes_on_from_an_earlier_answer() -> None:
    async with surface() as server:
        async with await open_socket(server) as socket:
            first = (await socket.response(create(input="one", instructions="only once")))["id"]
            await socket.answer(create(input="two", previous_response_id=first))
            unknown = await refused(socket, create(previous_response_id="resp_0"))
        async with await open_socket(server) as other:
            elsewhere = await refused(other, create(previous_response_id=first))
    prompt = bytes(server.fleet.generations[1].request.prompt_ids).decode()
    assert prompt == "user: one\nassistant: Hello there\nuser: two\nassistant:"
    assert unknown["error"]["code"] == elsewhere["error"]["code"] == "previous_response_not_found"


async def test_a_turn_may_be_warmed_and_then_be_built_upon() -> None:
    async with surface() as server, await open_socket(server) as socket:
        events = await socket.answer(create(input="one", generate=False))
        warmed = events[-1]["response"]
        await socket.answer(create(input="two", previous_response_id=warmed["id"]))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    assert (warmed["output"], warmed["usage"]["output_tokens"]) == ([], 0)
    first, second = (generation.request for generation in server.fleet.generations)
    assert first.sampling.max_tokens == 1
    assert bytes(second.prompt_ids) == b"user: one\nuser: two\nassistant:"


async def test_a_call_of_a_tool_is_answered_on_the_same_socket() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'

    tools = [{"type": "function", "name": "weather"}]
    async with surface(FakeFleet(saying(call))) as server, await open_socket(server) as socket:
        first = await socket.response(create(tools=tools))
        (item,) = first["output"]
        result = {
            "type": "function_call_output",
            "call_id": item["call_id"],
            "output": "warm",
        }
        more = create(input=[result], tools=tools, previous_response_id=first["id"])
        await socket.answer(more)
    prompt = bytes(server.fleet.generations[1].request.prompt_ids).decode()
    call_id = item["call_id"]
    assert prompt == (
        f"tool weather\nuser: hi\nassistant:  {call_id}=weather({{}})\n"
        f"tool of {call_id}: warm\nassistant:"
    )


async def test_earlier_answers_may_be_sent_back_as_they_came() -> None:
    history = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be kind"}]},
        {"type": "message", "role": "user", "content": "hi"},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "go on"},
    ]
    async with surface() as server, await open_socket(server) as socket:
        await socket.answer(create(input=history))
    prompt = bytes(server.fleet.generations[0].request.prompt_ids).decode()
    assert prompt == "system: be kind\nuser: hi\nassistant: yes\nuser: go on\nassistant:"


async def test_logprobs_come_where_they_are_asked_for() -> None:
    asked = create(include=["message.output_text.logprobs"], top_logprobs=1)
    async with surface() as server, await open_socket(server) as socket:
        last = await socket.response(asked)
    scored = last["output"][0]["content"][0]["logprobs"]
    assert "".join(token["token"] for token in scored) == "Hello there"
    assert scored[0]["top_logprobs"][0]["token"] == "H"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("not json", None),
        ("[]", None),
        ('{"type": "response.create", "input": NaN}', None),
        ({"type": "response.create"}, "input"),
        ({"type": "nonsense"}, "type"),
        ({"type": 5}, "type"),
        ({}, "type"),
        ({"type": "response.steer", "input": []}, "type"),
        (create(input=[]), "input"),
        (create(input=5), "input"),
        (create(input=[{"role": "user"}]), "input.0"),
        (create(input=[{"type": "function_call", "role": "user", "content": ""}]), "input.0"),
        (
            create(input=[{"role": "user", "content": [{"type": "input_image"}]}]),
            "input.0.content",
        ),
        (create(temperature="hot"), "temperature"),
        (create(max_output_tokens=0), "max_output_tokens"),
        (create(max_output_tokens=10**6), "input"),
        (create(tools=[{"type": "web_search"}]), "tools.0.type"),
        (create(background=True), "background"),
        (create(store=True), "store"),
        (create(text={"format": {"type": "yaml"}}), "text.format.type"),
        (create(stream_id=""), "stream_id"),
        (create(stream_id="a b"), "stream_id"),
        (create(stream_id=5), "stream_id"),
        (create(include=["everything"]), "include.0"),
        (create(unknown=1), "unknown"),
        (create(logit_bias={"999": 1}), "logit_bias"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_is_wrong_is_an_error_event_that_names_it(
    message: dict[str, Any] | str, param: str | None
) -> None:
    async with surface() as server, await open_socket(server) as socket:
        event = await refused(socket, message)
        assert (event["status"], event["error"]["param"]) == (400, param)
        await socket.answer(create())


async def test_binary_messages_and_empty_ones_are_refused() -> None:
    async with surface() as server, await open_socket(server) as socket:
        for message in (frame_bytes(BINARY, b"{}"), frame_bytes(BINARY), frame_bytes(TEXT)):
            await socket.client.send(message)
            assert (await socket.event())["status"] == 400


async def test_leaving_cancels_every_answer() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet) as server:
        async with await open_socket(server) as socket:
            for lane in "abc":
                await socket.send(create(stream_id=lane))
            generations = [await fleet.nth(index) for index in range(3)]
        with trio.fail_after(PATIENCE_S):
            for generation in generations:
                await generation.was_cancelled.wait()
        await server.all_connections_closed()
    assert all(g.cancelled == [CancelReason.CLIENT_GONE] for g in generations)


async def test_a_drain_lets_answers_finish_and_then_says_goodbye() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet) as server:
        idle, busy = await open_socket(server), await open_socket(server)
        async with idle.client.stream, busy.client.stream:
            await busy.send(create())
            generation = await fleet.nth(0)
            await busy.until("response.content_part.added")
            server.services.state.drain()
            for socket in (idle, busy):
                assert (await socket.until("notice"))[-1]["code"] == "draining"
            while (frame := await idle.frame()).opcode == PING:
                pass
            assert frame.close_code == 1001
            event = await refused(busy, create(stream_id="late"))
            assert (event["status"], event["error"]["code"]) == (503, "draining")
            generation.say("done")
            generation.finish()
            await busy.until("response.completed")
            assert (await busy.frame()).close_code == 1001
            assert await busy.client.is_closed()


async def test_a_socket_is_told_of_a_successor_and_served_until_the_drain() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet) as server, await open_socket(server) as socket:
        server.services.state.hand_over()
        assert (await socket.until("notice"))[-1]["code"] == "draining"
        await socket.send(create())
        generation = await fleet.nth(0)
        generation.say("still here")
        generation.finish()
        await socket.until("response.completed")
        server.services.state.drain()
        assert (await socket.frame()).close_code == 1001
