"""Tests of misbehaving WebSocket peers, with frames made by hand."""

from __future__ import annotations

import json
import struct
import zlib
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from server.contract.generation import CancelReason
from server.edge.listen import Edge, open_listening_socket
from tests.server.support.clock import pass_time
from tests.server.support.fakes import FakeFleet, by_hand
from tests.server.support.surface import (
    CONFIG,
    PATIENCE_S,
    RawClient,
    small_window,
    surface,
)
from tests.server.support.websocket import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    Socket,
    frame_bytes,
    handshake,
    open_socket,
)

if TYPE_CHECKING:
    from trio.testing import MockClock

CREATE = {"type": "response.create", "input": "hi"}


async def test_compression_is_not_negotiated() -> None:
    offer = {"Sec-WebSocket-Extensions": "permessage-deflate; client_max_window_bits"}
    async with surface() as server, await open_socket(server, offer) as socket:
        assert "sec-websocket-extensions" not in socket.headers
        bomb = zlib.compress(b"a" * 1_000_000)
        await socket.client.send(frame_bytes(TEXT, bomb, rsv=4))
        assert (await socket.frame()).close_code == 1002
        assert await socket.client.is_closed()


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (frame_bytes(TEXT, b"\xff\xfe"), 1007),
        (frame_bytes(TEXT, b"{}", masked=False), 1002),
        (frame_bytes(TEXT, b"{}", rsv=2), 1002),
        (frame_bytes(0x3, b""), 1002),
        (frame_bytes(0xB, b""), 1002),
        (frame_bytes(CONTINUATION, b"x"), 1002),
        (frame_bytes(PING, b"x" * 126), 1002),
        (frame_bytes(PING, b"", fin=False), 1002),
        (frame_bytes(TEXT, b"a", fin=False) + frame_bytes(TEXT, b"b"), 1002),
        (frame_bytes(CLOSE, b"\0"), 1002),
        (frame_bytes(CLOSE, struct.pack("!H", 999)), 1002),
    ],
    ids=[
        "utf-8", "unmasked", "reserved", "opcode-3", "opcode-b", "stray-continuation", "long-ping",
        "fragmented-ping", "nested", "short-close", "close-code",
    ],
)  # fmt: skip
async def test_a_broken_protocol_is_closed_with_its_code(frames: bytes, code: int) -> None:
    async with surface() as server, await open_socket(server) as socket:
        await socket.client.send(frames)
        assert (await socket.frame()).close_code == code
        assert await socket.client.is_closed()


@pytest.mark.parametrize("opcode", [TEXT, BINARY])
async def test_a_message_beyond_the_bound_is_1009(opcode: int) -> None:
    async with surface(ws_max_message_bytes=1000) as server, await open_socket(server) as socket:
        await socket.client.send(frame_bytes(opcode, b"x" * 600, fin=False))
        await socket.client.send(frame_bytes(CONTINUATION, b"x" * 600, fin=False))
        assert (await socket.frame()).close_code == 1009
        assert await socket.client.is_closed()


@pytest.mark.parametrize("kind", ["fragments", "pings", "pongs", "messages"])
async def test_a_flood_is_1008(kind: str) -> None:
    flood = {
        "fragments": frame_bytes(TEXT, fin=False) + frame_bytes(CONTINUATION, fin=False) * 1000,
        "pings": frame_bytes(PING) * 1000,
        "pongs": frame_bytes(PONG) * 1000,
        "messages": frame_bytes(TEXT, b"{}") * 1000,
    }[kind]
    frames_per_s = 500 if kind == "messages" else 50
    async with (
        surface(ws_max_frames_per_s=frames_per_s, ws_max_messages_per_s=20) as server,
        await open_socket(server) as socket,
    ):
        await socket.client.send(flood)
        while (frame := await socket.frame()).opcode in {TEXT, PONG}:
            pass
        assert frame.close_code == 1008


async def test_a_close_behind_unread_messages_is_noticed() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet) as server:
        async with await open_socket(server) as socket:
            await socket.send(CREATE)
            generation = await fleet.nth(0)
            await socket.client.send(frame_bytes(TEXT, b"{}") * 30)
        assert await generation.cancellations() == [CancelReason.CLIENT_GONE]
        await server.all_connections_closed()


async def test_a_close_of_a_client_that_reads_nothing_is_noticed() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet, send_buffer_bytes=4096) as server:
        socket = Socket(await small_window(server), {})
        async with socket.client.stream:
            await socket.client.send(handshake())
            await socket.client.head()
            await socket.send(CREATE)
            generation = await fleet.nth(0)
            for _ in range(10):  # more than both kernels buffer, so that a write is stuck
                generation.say("x" * 100_000)
            await trio.testing.wait_all_tasks_blocked(0.05)
            await socket.client.send(frame_bytes(CLOSE, struct.pack("!H", 1000)))
            await generation.cancellations()
        assert generation.cancelled == [CancelReason.CLIENT_GONE]


async def test_nonsense_from_a_client_that_reads_nothing_ends_its_socket() -> None:
    """The reader must not wait to report an error: it would notice nothing else."""
    fleet = FakeFleet(by_hand)
    async with (
        surface(
            fleet, stall_timeout_s=30.0, ws_max_frames_per_s=1e6, ws_max_messages_per_s=1e6
        ) as server,
        trio.open_nursery() as nursery,
        await small_window(server) as client,
    ):
        await client.send(handshake())
        await client.head()
        await client.send(frame_bytes(TEXT, json.dumps(CREATE).encode()))
        generation = await fleet.nth(0)

        async def babble() -> None:
            while True:
                await client.send(frame_bytes(TEXT, b'{"type": "?"}') * 100)

        nursery.start_soon(babble)
        await generation.cancellations()
        nursery.cancel_scope.cancel()
        assert generation.cancelled == [CancelReason.CLIENT_GONE]


@pytest.mark.slow
async def test_a_peer_without_pongs_is_closed_and_what_it_began_is_freed() -> None:
    fleet = FakeFleet(by_hand)
    async with (
        surface(fleet, ws_ping_s=0.05, ws_pong_timeout_s=0.2) as server,
        await open_socket(server) as socket,
    ):
        await socket.send(CREATE)
        generation = await fleet.nth(0)
        with trio.fail_after(PATIENCE_S):
            while (frame := await socket.frame()).opcode in {TEXT, PING}:
                pass
        assert frame.close_code == 1001
        await generation.cancellations()


@pytest.mark.slow
async def test_a_peer_with_pongs_is_not(mock_clock: MockClock) -> None:
    async with (
        surface(ws_ping_s=0.1, ws_pong_timeout_s=1.0) as server,
        trio.open_nursery() as nursery,
    ):

        async def let_time_pass() -> None:
            while True:
                await pass_time(mock_clock, 0.05)

        nursery.start_soon(let_time_pass)
        async with await open_socket(server) as socket:
            for _ in range(15):
                frame = await socket.frame()
                assert frame.opcode == PING
                await socket.client.send(frame_bytes(PONG, frame.payload))
            await socket.answer(CREATE)
        nursery.cancel_scope.cancel()


async def test_a_client_s_close_is_answered() -> None:
    async with surface() as server:
        async with await open_socket(server) as socket:
            await socket.client.send(frame_bytes(CLOSE, struct.pack("!H", 1000)))
            assert (await socket.frame()).close_code == 1000
            assert await socket.client.is_closed()
        await server.all_connections_closed()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "http://localhost:3000"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Sec-WebSocket-Version": "8"}, 400),
        ({"Sec-WebSocket-Key": ""}, 400),
    ],
)
async def test_a_foreign_or_broken_handshake_is_refused(
    headers: dict[str, str], status: int
) -> None:
    async with surface() as server, await server.sent(handshake(headers)) as client:
        answer = await client.answer()
        assert answer.status == status
        if status == 403:
            assert answer.error["code"] == "permission_denied"
        assert await client.is_closed()


async def test_the_page_s_own_origin_may_connect() -> None:
    async with surface() as server:
        host = f"localhost:{server.port}"
        socket = await open_socket(server, {"Host": host, "Origin": f"http://{host}"})
        await socket.client.stream.aclose()


async def test_a_loop_of_sends_into_a_closed_socket_lets_others_run() -> None:
    """Even if the application awaits nothing else: here it only sends."""
    has_sent, turns = trio.Event(), 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async def only_sends(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401
        await receive()
        await send({"type": "websocket.accept", "headers": []})
        while (await receive())["type"] != "websocket.disconnect":
            pass
        before = turns
        for _ in range(1000):
            await send({"type": "websocket.send", "text": "nobody hears"})
        assert turns - before >= 900
        has_sent.set()

    edge = Edge(only_sends, CONFIG)
    listening = open_listening_socket(CONFIG)
    async with trio.open_nursery() as nursery:
        await nursery.start(edge.run, listening)
        nursery.start_soon(count_turns)
        client = RawClient(await trio.open_tcp_stream(*listening.getsockname()))
        await client.send(handshake())
        await client.head()
        await client.stream.aclose()
        with trio.fail_after(PATIENCE_S):
            await has_sent.wait()
        nursery.cancel_scope.cancel()


async def test_an_answer_to_a_socket_that_was_reset_ends() -> None:
    fleet = FakeFleet(by_hand)
    async with surface(fleet) as server:
        socket = await open_socket(server)
        await socket.send(CREATE)
        generation = await fleet.nth(0)
        for _ in range(1000):
            generation.say("text")
        await socket.client.stream.aclose()
        await generation.cancellations()
        assert (await server.request("GET", "/health/live")).status == 200
