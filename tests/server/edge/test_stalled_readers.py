"""Tests of clients that stop reading: they end within the stall timeout, and no other client
notices."""

from __future__ import annotations

import json
import socket as stdlib_socket
from typing import TYPE_CHECKING

import pytest
import trio

from server.contract.generation import CancelReason, Delta
from server.edge.tcp import CUT_AFTER_STALL_S
from tests.server.support.clock import pass_time
from tests.server.support.fakes import FakeFleet, FakeGeneration, by_hand
from tests.server.support.surface import PATIENCE_S, request_bytes, small_window, surface
from tests.server.support.websocket import begin

if TYPE_CHECKING:
    from trio.testing import MockClock

    from tests.server.support.surface import RawClient

pytestmark = pytest.mark.slow

STALL_S = 0.2
CUT_S = STALL_S + CUT_AFTER_STALL_S
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
BURST = "x" * 4096
MOST_UNREAD = 64


async def was_reset(client: RawClient) -> bool:
    """Read what is left; return whether it ended in a reset instead of a clean end."""
    try:
        while await client.stream.receive_some():
            pass
    except trio.BrokenResourceError:
        return True
    return False


async def talk(generation: FakeGeneration) -> None:
    """Send text until the client is gone, at most one token window at a time; otherwise the end of
    a stall would have a hundred megabytes to encode."""
    while not generation.was_cancelled.is_set():
        if generation.num_unread < MOST_UNREAD:
            generation.say(BURST)
        await trio.lowlevel.checkpoint()


async def test_a_stalled_stream_is_cut_and_others_go_on() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet, stall_timeout_s=STALL_S) as server, trio.open_nursery() as nursery:
        async with await small_window(server) as stalled:
            generation = await begin(server, stalled, "sse")
            nursery.start_soon(talk, generation)
            began = trio.current_time()
            with trio.fail_after(CUT_S + PATIENCE_S):
                while not generation.was_cancelled.is_set():
                    other = await server.request("GET", "/health/live")
                    assert other.status == 200
            assert trio.current_time() - began >= CUT_S * 0.9
            assert generation.cancelled == [CancelReason.STALLED]
            assert await was_reset(stalled)
        await server.all_connections_closed()


async def test_a_stalled_whole_answer_is_cut() -> None:
    def script(generation: FakeGeneration) -> None:
        generation.push(Delta("x" * 8_000_000, ()))
        generation.finish()

    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    async with (
        surface(FakeFleet(script), stall_timeout_s=STALL_S) as server,
        await small_window(server) as stalled,
    ):
        await stalled.send(request_bytes("POST", "/v1/chat/completions", body=body))
        await server.fleet.nth(0)
        await server.all_connections_closed(CUT_S + PATIENCE_S)


async def test_a_slow_but_steady_reader_gets_everything(mock_clock: MockClock) -> None:
    length = 600_000

    def script(generation: FakeGeneration) -> None:
        generation.push(Delta("x" * length, ()))
        generation.finish()

    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    async with (
        surface(FakeFleet(script), stall_timeout_s=STALL_S) as server,
        await small_window(server) as slow,
    ):
        await slow.send(request_bytes("POST", "/v1/chat/completions", body=body))
        _, headers = await slow.head()
        began = trio.current_time()
        wanted = int(headers["content-length"])
        got = 0
        while got < wanted:
            got += len(await slow.exactly(min(16_384, wanted - got)))
            await pass_time(mock_clock, 0.02)
        assert got == wanted
        assert trio.current_time() - began > CUT_S


async def test_a_stalled_websocket_is_cut() -> None:
    fleet = FakeFleet(by_hand)
    async with (
        surface(fleet, stall_timeout_s=STALL_S) as server,
        trio.open_nursery() as nursery,
        await small_window(server) as client,
    ):
        generation = await begin(server, client, "ws")
        nursery.start_soon(talk, generation)
        with trio.fail_after(CUT_S + PATIENCE_S):
            await generation.was_cancelled.wait()
        assert generation.cancelled == [CancelReason.STALLED]
        await server.all_connections_closed()


@pytest.mark.parametrize("kind", ["sse", "ws"])
async def test_a_client_that_the_kernel_gives_up_is_stalled_too(kind: str) -> None:
    """A closed window fills the kernel's buffers first; its timeout may end before ours starts."""
    fleet = FakeFleet(by_hand)
    async with surface(fleet, stall_timeout_s=30.0) as server, trio.open_nursery() as nursery:
        server.listening.setsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_USER_TIMEOUT, 200)
        async with await small_window(server) as client:
            generation = await begin(server, client, kind)
            nursery.start_soon(talk, generation)
            assert await generation.cancellations() == [CancelReason.STALLED]


async def test_stalled_readers_do_not_hold_up_the_end_of_the_server() -> None:
    fleet = FakeFleet(by_hand)
    async with trio.open_nursery() as nursery:
        with trio.fail_after(PATIENCE_S):
            async with surface(fleet, stall_timeout_s=STALL_S) as server:
                stalled = [await small_window(server) for _ in range(5)]
                for index, client in enumerate(stalled):
                    await client.send(request_bytes("POST", "/v1/chat/completions", body=BODY))
                    nursery.start_soon(talk, await fleet.nth(index))
                for generation in fleet.generations:
                    await generation.was_read.wait()
        for client in stalled:
            await trio.aclose_forcefully(client.stream)
        nursery.cancel_scope.cancel()
