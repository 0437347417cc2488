"""Tests of resuming answers over a WebSocket of the Responses API: an answer cut anywhere continues
with the same events."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from server.contract.generation import CancelReason
from tests.server.support.fakes import FakeFleet, by_hand
from tests.server.support.surface import MODEL, surface
from tests.server.support.tenants import tenancy_of
from tests.server.support.websocket import CLOSE, frame_bytes, open_socket
from triolet.errors import no_worker

if TYPE_CHECKING:
    from tests.server.support.surface import Surface
    from tests.server.support.websocket import Socket

WORDS = [f"word{number} " for number in range(40)]
END = "response.completed"


def create(**more: object) -> dict[str, Any]:
    return {"type": "response.create", "model": MODEL, "input": "hi", "resumable": True, **more}


def resume(response_id: str, position: int | None = None, **more: object) -> dict[str, Any]:
    message = {"type": "response.resume", "response_id": response_id, **more}
    return message if position is None else message | {"sequence_number": position}


async def some(socket: Socket, count: int) -> list[dict[str, Any]]:
    return [await socket.event() for _ in range(count)]


async def begin(server: Surface, socket: Socket, count: int = 0) -> dict[str, Any]:
    """Send a request, generate some words, and return the first event."""
    number = len(server.fleet.generations)
    await socket.send(create())
    generation = await server.fleet.nth(number)
    for word in WORDS[:count]:
        generation.say(word)
        await trio.testing.wait_all_tasks_blocked()
    return await socket.event()


async def test_an_answer_cut_anywhere_and_resumed_has_the_same_events() -> None:
    rng = random.Random(6)
    async with surface(FakeFleet(by_hand)) as server:
        async with await open_socket(server) as socket:
            first = await begin(server, socket, len(WORDS))
            response_id = first["response"]["id"]
            server.fleet.generations[0].finish()
            uncut = [first, *await socket.until(END)]
        assert [event["sequence_number"] for event in uncut] == list(range(len(uncut)))
        assert len(uncut) > len(WORDS)
        position: int | None = None
        for cut in [*sorted(rng.sample(range(1, len(uncut)), 20)), len(uncut)]:
            async with await open_socket(server) as socket:
                await socket.send(resume(response_id, position))
                begun = 0 if position is None else position + 1
                assert await some(socket, cut - begun) == uncut[begun:cut]
            position = cut - 1
        assert len(server.fleet.generations) == 1


async def test_a_live_answer_goes_on_over_another_connection_and_in_its_conversation() -> None:
    async with surface(FakeFleet(by_hand)) as server:
        async with await open_socket(server) as socket:
            first = await begin(server, socket, 1)
            await socket.until("response.output_text.delta")
        await server.all_connections_closed()
        generation = server.fleet.generations[0]
        assert not generation.cancelled
        generation.say("more")
        async with await open_socket(server) as socket:
            await socket.send(resume(first["response"]["id"], 4))
            await socket.until("response.output_text.delta")
            generation.finish()
            last = (await socket.until(END))[-1]
            assert last["response"]["output"][0]["content"][0]["text"] == f"{WORDS[0]}more"
            await socket.send(
                {"type": "response.create", "model": MODEL, "input": "and then?",
                 "previous_response_id": first["response"]["id"]}
            )  # fmt: skip
            again = await server.fleet.nth(1)
            prompt = bytes(again.request.prompt_ids)
            assert (
                prompt
                == f"user: hi\nassistant: {WORDS[0]}more\nuser: and then?\nassistant:".encode()
            )
            again.finish()
            await socket.until(END)


@pytest.mark.parametrize(("code", "goes_on"), [(None, True), (1000, True), (1001, False)])
async def test_an_answer_of_a_page_that_goes_away_goes_on_for_a_shorter_time(
    code: int | None, goes_on: bool
) -> None:
    async with surface(FakeFleet(by_hand)) as server:
        async with await open_socket(server) as socket:
            await begin(server, socket, 1)
            await socket.until("response.output_text.delta")
            if code is not None:
                await socket.client.send(frame_bytes(CLOSE, code.to_bytes(2, "big")))
                await socket.frame()
        await server.all_connections_closed()
        (generation,) = server.fleet.generations
        bounds, now = server.services.config.resume, trio.current_time()
        server.services.kept.sweep(now + bounds.away_grace_s - 1.0)
        assert not generation.cancelled
        server.services.kept.sweep(now + bounds.away_grace_s)
        assert (not generation.cancelled) == goes_on
        server.services.kept.sweep(now + bounds.grace_s)
        assert generation.cancelled[0] is CancelReason.CLIENT_GONE


async def test_who_did_not_ask_for_it_is_cancelled_at_once_and_cannot_resume() -> None:
    async with surface(FakeFleet(by_hand)) as server:
        async with await open_socket(server) as socket:
            await socket.send(create(resumable=False))
            response_id = (await socket.event())["response"]["id"]
        generation = server.fleet.generations[0]
        assert (await generation.cancellations())[0] is CancelReason.CLIENT_GONE
        async with await open_socket(server) as socket:
            await socket.send(resume(response_id))
            event = await socket.event()
            assert (event["status"], event["error"]["param"]) == (404, "response_id")


async def test_a_resumed_answer_can_be_stopped_and_says_so_to_all() -> None:
    async with surface(FakeFleet(by_hand)) as server:
        async with await open_socket(server) as first_socket:
            first = await begin(server, first_socket, 1)
            response_id = first["response"]["id"]
            async with await open_socket(server) as second_socket:
                await second_socket.send(resume(response_id))
                await second_socket.until("response.output_text.delta")
                await second_socket.send({"type": "response.cancel", "response_id": response_id})
                ends = [
                    (await socket.until("response.incomplete"))[-1]
                    for socket in (first_socket, second_socket)
                ]
        assert ends[0] == ends[1]
        assert ends[0]["response"]["status"] == "cancelled"


async def test_a_failure_is_told_again() -> None:
    async with surface(FakeFleet(by_hand)) as server:
        async with await open_socket(server) as socket:
            first = await begin(server, socket)
            server.fleet.generations[0].fail(no_worker("they left"))
            failed = (await socket.until("response.failed"))[-1]
        async with await open_socket(server) as socket:
            await socket.send(resume(first["response"]["id"], failed["sequence_number"] - 1))
            assert await socket.event() == failed


@pytest.mark.parametrize(
    ("message", "status", "param"),
    [
        (resume("resp_unknown"), 404, "response_id"),
        ({"type": "response.resume"}, 400, "response_id"),
        (resume("x" * 65), 400, "response_id"),
        (resume("resp_unknown", -1), 400, "sequence_number"),
        (resume("resp_unknown", True), 400, "sequence_number"),
    ],
)
async def test_what_cannot_be_resumed_is_refused_by_name(
    message: dict[str, Any], status: int, param: str
) -> None:
    async with surface() as server, await open_socket(server) as socket:
        await socket.send(message)
        event = await socket.event()
        assert (event["status"], event["error"]["param"]) == (status, param)


async def test_a_position_that_was_not_reached_is_refused_by_name() -> None:
    async with surface(FakeFleet(by_hand)) as server, await open_socket(server) as socket:
        first = await begin(server, socket)
        await socket.send(resume(first["response"]["id"], 500, stream_id="other"))
        while (event := await socket.event())["type"] != "error":
            pass
        assert (event["status"], event["error"]["param"]) == (400, "sequence_number")
        assert event["stream_id"] == "other"


async def test_another_tenants_answer_is_not_there() -> None:
    tenancy = tenancy_of(alice="alice-key", bob="bob-key")
    alice, bob = ({"authorization": f"Bearer {name}-key"} for name in ("alice", "bob"))
    async with surface(tenancy=tenancy) as server:
        async with await open_socket(server, alice) as socket:
            await socket.send(create())
            events = await socket.until(END)
        for who, is_there in ((bob, False), (alice, True)):
            async with await open_socket(server, who) as socket:
                await socket.send(resume(events[0]["response"]["id"]))
                event = await socket.event()
                assert event.get("status") == (None if is_there else 404)
                assert (event == events[0]) is is_there
