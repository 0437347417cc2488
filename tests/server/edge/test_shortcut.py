"""Tests of writing a token directly to the socket: used where possible, in order, never twice."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from server.contract.generation import CancelReason, Delta
from tests.server.support.fakes import FakeFleet, by_hand
from tests.server.support.surface import request_bytes, small_window, sse_events, surface
from tests.server.support.websocket import begin

if TYPE_CHECKING:
    from trio.testing import MockClock

    from tests.server.support.surface import RawClient, Surface

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
PIECES = 300
"""Pieces of 4 KiB: many times what the kernel buffers for a client that does not read."""
FIRST_WAITS = 5
"""Waits for room in the kernel, each twice as long as the previous one, up to a second."""
MARK = re.compile(rb"<(\d+)>")


async def test_tokens_of_an_open_stream_take_the_short_way() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet) as server:
        async with await server.sent(
            request_bytes("POST", "/v1/chat/completions", body=BODY)
        ) as client:
            await client.head()
            generation = await fleet.nth(0)
            await client.until(b'"content":""')
            usual = server.edge.writes["usual"]
            for word in (b"one", b"two", b"three"):
                generation.say(word.decode())
                await client.until(b'"content":"%b"' % word)
            assert server.edge.writes == {"direct": 3, "usual": usual}
            generation.finish()
            await client.until(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        exposition = (await server.request("GET", "/metrics")).body.decode()
        assert 'triolet_client_writes_total{way="direct"} 3.0' in exposition


async def test_a_client_of_old_gets_a_body_without_chunks() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet) as server:
        async with await server.connect() as client:
            request = request_bytes("POST", "/v1/chat/completions", body=BODY)
            await client.send(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
            await client.head()
            generation = await fleet.nth(0)
            generation.say("one")
            generation.finish()
            body = await client.until(b"data: [DONE]\n\n")
            assert await client.is_closed()
        assert [event["choices"][0]["delta"].get("content") for event in sse_events(body)[:-1]] == [
            "",
            "one",
            None,
        ]
        assert server.edge.writes["direct"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sse", "ws"])
async def test_what_does_not_fit_arrives_once_and_in_order(kind: str) -> None:
    """The kernel takes part of a piece, then nothing, then has room again and again."""
    fleet = FakeFleet(by_hand)
    async with surface(fleet) as server, trio.open_nursery() as nursery:
        async with await small_window(server) as client:
            generation = await begin(server, client, kind)

            async def talk() -> None:
                for number in range(PIECES):
                    generation.push(Delta(f"<{number}>" + "x" * 4096, ()))
                    await wait_all_tasks_blocked()
                generation.finish()

            nursery.start_soon(talk)
            last = b"data: [DONE]" if kind == "sse" else b"response.content_part.done"
            received = await client.until(last)
            # The closing events of a Responses answer repeat its text.
            received = received.partition(b"response.output_text.done")[0]
            assert [int(mark) for mark in MARK.findall(received)] == list(range(PIECES))
        assert server.edge.writes["direct"] > 0


async def fill(client: RawClient, server: Surface) -> None:
    """Start a stream and give it more than the kernel buffers."""
    generation = await begin(server, client, "sse")
    for _ in range(PIECES):
        generation.push(Delta("x" * 4096, ()))
    generation.finish()
    await wait_all_tasks_blocked()


@pytest.mark.slow
async def test_the_servers_own_standstill_is_not_held_against_a_reader(
    mock_clock: MockClock,
) -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet, stall_timeout_s=10.0) as server, await small_window(server) as client:
        await fill(client, server)
        for _ in range(5):
            mock_clock.jump(100.0)
            await wait_all_tasks_blocked()
        received = await client.until(b"data: [DONE]\n\n")
        assert received.count(b"x") >= PIECES * 4096


@pytest.mark.slow
async def test_a_reader_that_reads_nothing_all_the_while_is_cut(mock_clock: MockClock) -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet, stall_timeout_s=10.0) as server, await small_window(server) as client:
        await fill(client, server)
        for _ in range(10):
            mock_clock.jump(1.0)
            await wait_all_tasks_blocked()
        assert fleet.generations[0].cancelled == []
        # A jump counts only as the wait that it ends, and the first waits are short.
        for _ in range(FIRST_WAITS):
            mock_clock.jump(1.0)
            await wait_all_tasks_blocked()
        assert fleet.generations[0].cancelled == [CancelReason.STALLED]
