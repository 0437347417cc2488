"""Tests of links that every network must pass: in memory, ipc and tcp."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import trio

from transport.codec import encode
from transport.frames import Drain
from transport.gate import STRANGER
from transport.handshake import make_hello
from transport.link import MAX_BAD_FRAMES, LinkMessage, LinkStatistics, PeerBusy, PeerGone
from triolet.errors import ConfigError, LocalProtocolError
from triolet.ids import PeerId, Role

from .cancel_at import Moment, run_cancelled_at
from .ends import (
    KINDS,
    ME,
    PATIENCE_S,
    SERVER,
    Ends,
    chunk,
    is_gone,
    number_of,
    open_ends,
    receive_numbers,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from transport.frames import KvChunk
    from transport.link import Connection, Listener


@pytest.fixture(params=KINDS)
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ends]:
    opened = open_ends(request.param, tmp_path)
    yield opened
    opened.close()


async def test_frames_go_both_ways_in_order(ends: Ends) -> None:
    listener, connection = await ends.linked()
    numbers = [float(n) for n in range(500)]
    up: list[float] = []
    down: list[float] = []
    for number in numbers:
        connection.send_nowait(Drain(number))
        listener.send_nowait(ME, Drain(number))
    with trio.fail_after(PATIENCE_S):
        await receive_numbers(listener, 500, up)
        await receive_numbers(connection, 500, down)
    assert up == down == numbers
    assert listener.statistics() == connection.statistics() == LinkStatistics(501, 501, 0)


async def test_a_message_names_its_sender_on_the_bound_side_only(ends: Ends) -> None:
    listener, connection = await ends.linked()
    connection.send_nowait(Drain(1.0))
    listener.send_nowait(ME, Drain(2.0))
    with trio.fail_after(PATIENCE_S):
        assert await listener.receive_many() == [LinkMessage(ME, Drain(1.0), None)]
        assert await connection.receive_many() == [LinkMessage(b"", Drain(2.0), None)]


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
async def test_a_payload_arrives_as_it_was(ends: Ends, size: int) -> None:
    listener, connection = await ends.linked()
    payload = bytes(n % 251 for n in range(1000)) * (size // 1000 + 1)
    connection.send_nowait(chunk(1), memoryview(payload)[:size])
    listener.send_nowait(ME, chunk(2), payload[:size])
    with trio.fail_after(PATIENCE_S):
        [up] = await listener.receive_many()
        [down] = await connection.receive_many()
    assert (up.frame, down.frame) == (chunk(1), chunk(2))
    assert up.payload is not None
    assert down.payload is not None
    assert bytes(up.payload) == bytes(down.payload) == payload[:size]


async def test_a_payload_belongs_to_a_chunk(ends: Ends) -> None:
    listener, connection = await ends.linked()
    with pytest.raises(LocalProtocolError):
        connection.send_nowait(Drain(1.0), b"kv")
    with pytest.raises(LocalProtocolError):
        await connection.send(chunk(0))
    with pytest.raises(LocalProtocolError):
        listener.send_nowait(ME, chunk(0))


async def test_receive_many_takes_no_more_than_asked_for(ends: Ends) -> None:
    listener, connection = await ends.linked()
    for number in range(10):
        connection.send_nowait(Drain(float(number)))
    received: list[float] = []
    with trio.fail_after(PATIENCE_S):
        while len(received) < 10:
            batch = await listener.receive_many(3)
            assert 1 <= len(batch) <= 3
            received += [number_of(m) for m in batch]
    assert received == [float(n) for n in range(10)]


async def test_many_peers_are_told_apart(ends: Ends) -> None:
    listener = ends.listen()
    peers = [PeerId(Role.SERVER, f"web-{n}", n + 1) for n in range(8)]
    connections = {peer.identity(): ends.connect(peer.identity()) for peer in peers}
    with trio.fail_after(PATIENCE_S):
        for peer in peers:
            await connections[peer.identity()].send(make_hello(peer))
        seen: set[bytes] = set()
        while len(seen) < 8:
            seen |= {message.sender for message in await listener.receive_many()}
        assert seen == set(connections)
        for number, identity in enumerate(connections):
            listener.send_nowait(identity, Drain(float(number)))
            [message] = await connections[identity].receive_many()
            assert number_of(message) == number


async def test_before_its_hello_a_connection_is_a_stranger_that_can_be_answered(
    ends: Ends,
) -> None:
    listener, connection = ends.listen(), ends.connect()
    with trio.fail_after(PATIENCE_S):
        await connection.send(Drain(1.0))
        [message] = await listener.receive_many()
        assert message.sender.startswith(STRANGER)
        with pytest.raises(PeerGone):
            listener.send_nowait(ME, Drain(13.0))
        listener.send_nowait(message.sender, Drain(2.0))
        assert number_of((await connection.receive_many())[0]) == 2.0


async def test_who_connects_under_a_peers_name_gets_nothing_of_it_and_leaves_it_alone(
    ends: Ends,
) -> None:
    listener, connection = await ends.linked()
    with ends.enemy(ME) as enemy, trio.fail_after(PATIENCE_S):
        enemy.send(encode(Drain(5.0)))
        [message] = await listener.receive_many()
        assert message.sender != ME
        listener.send_nowait(ME, Drain(3.0))
        assert number_of((await connection.receive_many())[0]) == 3.0
        connection.send_nowait(Drain(4.0))
        assert await listener.receive_many() == [LinkMessage(ME, Drain(4.0), None)]
        assert not enemy.has_received()


async def test_whoever_says_hello_last_has_the_name_and_who_had_it_is_told_apart(
    ends: Ends,
) -> None:
    listener, older = await ends.linked()
    newer = ends.connect()
    with trio.fail_after(PATIENCE_S):
        await newer.send(make_hello(SERVER))
        assert (await listener.receive_many())[0].sender == ME
        listener.send_nowait(ME, Drain(1.0))
        assert number_of((await newer.receive_many())[0]) == 1.0
        older.send_nowait(Drain(2.0))
        [message] = await listener.receive_many()
        assert message.sender.startswith(STRANGER)
        older.send_nowait(make_hello(SERVER))
        assert (await listener.receive_many())[0].sender == ME
        listener.send_nowait(ME, Drain(3.0))
        assert number_of((await older.receive_many())[0]) == 3.0


async def test_a_peer_that_redials_says_hello_before_it_is_sent_anything(ends: Ends) -> None:
    listener, connection = await ends.linked()
    connection.close()
    await until(lambda: is_gone(lambda: listener.send_nowait(ME, Drain(13.0))))
    again = ends.connect()
    with trio.fail_after(PATIENCE_S):
        await again.send(Drain(1.0))
        await listener.receive_many()
        with pytest.raises(PeerGone):
            listener.send_nowait(ME, Drain(13.0))
        await again.send(make_hello(SERVER))
        await listener.receive_many()
        listener.send_nowait(ME, Drain(2.0))
        assert number_of((await again.receive_many())[0]) == 2.0


async def test_before_anybody_is_bound_send_nowait_fails_and_send_waits(ends: Ends) -> None:
    probe, connection = await ends.linked()
    probe.close()
    await until(lambda: is_gone(lambda: connection.send_nowait(Drain(0.0))))
    with trio.move_on_after(0.05) as waited:
        await connection.send(Drain(1.0))
    assert waited.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.send, Drain(2.0))
        await trio.testing.wait_all_tasks_blocked()
        listener = ends.listen()
        with trio.fail_after(PATIENCE_S):
            [message] = await listener.receive_many()
    assert number_of(message) == 2.0


async def test_a_peer_nobody_knows_is_gone(ends: Ends) -> None:
    listener, _ = await ends.linked()
    with pytest.raises(PeerGone):
        listener.send_nowait(b"nobody", Drain(1.0))


async def test_a_peer_that_closed_is_gone(ends: Ends) -> None:
    listener, connection = await ends.linked()
    connection.close()
    await until(lambda: is_gone(lambda: listener.send_nowait(ME, Drain(1.0))))


async def fill(send: Callable[[KvChunk, bytes], None], limit: int) -> int:
    for count in range(limit):
        try:
            send(chunk(count), bytes(64 * 1024))
        except PeerBusy:
            return count
        await trio.lowlevel.checkpoint()
    raise AssertionError(f"took {limit} chunks")


async def test_a_peer_that_does_not_read_absorbs_little_and_is_busy(ends: Ends) -> None:
    listener, connection = await ends.linked(hwm=4)
    # Four on each side, plus the kernel's buffers.
    absorbed = await fill(connection.send_nowait, limit=600)
    assert await fill(lambda f, p: listener.send_nowait(ME, f, p), limit=600) >= 1
    received = 0
    with trio.fail_after(PATIENCE_S):
        while received < absorbed:
            received += len(await listener.receive_many())
        await connection.send(Drain(1.0))


async def test_the_next_life_of_a_peer_gets_nothing_that_was_sent_to_the_last(ends: Ends) -> None:
    listener, connection = await ends.linked()
    for _ in range(5):
        connection.send_nowait(Drain(13.0))
    listener.close()
    await until(lambda: is_gone(lambda: connection.send_nowait(Drain(13.0))))
    reborn = ends.listen()
    with trio.fail_after(PATIENCE_S):
        await connection.send(make_hello(SERVER))
        [message] = await reborn.receive_many()
        assert message.frame == make_hello(SERVER)
        reborn.send_nowait(ME, Drain(2.0))
        [message] = await connection.receive_many()
    assert number_of(message) == 2.0


async def test_a_sender_of_bad_frames_is_cut_off_and_nobody_else(ends: Ends) -> None:
    listener, connection = await ends.linked()
    good = encode(Drain(7.0))
    with ends.enemy(b"enemy") as enemy, trio.fail_after(PATIENCE_S):
        enemy.send(good)
        [message] = await listener.receive_many()
        assert number_of(message) == 7.0
        listener.send_nowait(message.sender, Drain(1.0))
        for bad in (b"", b"\xc0", good + b"!")[:MAX_BAD_FRAMES]:
            enemy.send(bad)
        enemy.send(good, b"payload", b"more", b"and more", b"and more")
        enemy.send(good)
        await connection.send(Drain(1.0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_expect_only, listener, Drain(1.0))
            await until(lambda: listener.statistics().bad_frames == MAX_BAD_FRAMES + 2)
            connection.send_nowait(Drain(1.0))
        with pytest.raises(PeerGone):
            listener.send_nowait(message.sender, Drain(1.0))
        listener.send_nowait(ME, Drain(1.0))


async def _expect_only(listener: Listener, frame: Drain) -> None:
    received = 0
    while received < 2:
        for message in await listener.receive_many():
            assert message == LinkMessage(ME, frame, None)
            received += 1


async def test_a_connection_that_breaks_says_so_once_each_time(ends: Ends) -> None:
    listener, connection = await ends.linked()
    for _ in range(2):
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.wait_broken)
                await trio.testing.wait_all_tasks_blocked(0.01)
                listener.close()
        with trio.move_on_after(0.01) as calm:
            await connection.wait_broken()
        assert calm.cancelled_caught
        listener = ends.listen()
        with trio.fail_after(PATIENCE_S):
            await connection.send(make_hello(SERVER))
            await listener.receive_many()


async def test_a_break_that_another_task_notes_first_wakes_the_one_that_waits(ends: Ends) -> None:
    listener, connection = await ends.linked(hwm=1_000_000)  # never full in this test
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.wait_broken)
            await trio.testing.wait_all_tasks_blocked(0.01)
            listener.close()
            give_up = time.monotonic() + PATIENCE_S
            # No checkpoint in this loop, so the waiting task cannot run in between.
            while not is_gone(lambda: connection.send_nowait(Drain(0.0))):
                assert time.monotonic() < give_up


async def test_closing_wakes_whoever_waits(ends: Ends) -> None:
    listener, connection = await ends.linked(hwm=2)

    async def expect_closed(end: Listener | Connection) -> None:
        with pytest.raises(trio.ClosedResourceError):
            await end.receive_many()

    async def expect_no_break() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await connection.wait_broken()

    async def send_for_ever() -> None:
        while True:
            await connection.send(chunk(0), bytes(64 * 1024))

    async def expect_no_more_room() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await send_for_ever()

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(expect_closed, connection)
            nursery.start_soon(expect_no_break)
            nursery.start_soon(expect_no_more_room)
            await trio.testing.wait_all_tasks_blocked(0.01)
            connection.close()
            connection.close()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_drain_until_closed, listener)
            await trio.testing.wait_all_tasks_blocked(0.01)
            listener.close()
            listener.close()
    with pytest.raises(trio.ClosedResourceError):
        connection.send_nowait(Drain(1.0))
    with pytest.raises(trio.ClosedResourceError):
        listener.send_nowait(ME, Drain(1.0))
    with pytest.raises(trio.ClosedResourceError):
        await connection.send(Drain(1.0))


async def _drain_until_closed(listener: Listener) -> None:
    with pytest.raises(trio.ClosedResourceError):
        await _receive_for_ever(listener)


async def _receive_for_ever(listener: Listener) -> None:
    while True:
        await listener.receive_many()


async def test_an_address_in_use_is_a_config_error_that_says_so(ends: Ends) -> None:
    listener = ends.listen()
    with pytest.raises(ConfigError, match="in use"):
        ends.listen()
    listener.close()


async def test_receive_gives_other_tasks_a_turn_even_when_frames_never_end(ends: Ends) -> None:
    listener, connection = await ends.linked()
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    for _ in range(50):
        connection.send_nowait(Drain(1.0))
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            for _ in range(50):
                await listener.receive_many(1)
            nursery.cancel_scope.cancel()
    assert turns >= 40


MESSAGES = 12
MOMENTS = pytest.mark.parametrize("moment", Moment)


@pytest.mark.slow
@MOMENTS
async def test_a_receive_cancelled_anywhere_loses_and_doubles_nothing(
    ends: Ends, moment: Moment
) -> None:
    listener, connection = await ends.linked()
    step, has_struck = 0, True
    while has_struck:
        received: list[float] = []

        async def victim(into: list[float] = received) -> None:
            await receive_numbers(listener, MESSAGES, into, max_messages=2)

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_send_slowly, connection)
                has_struck = await run_cancelled_at(step, moment, victim)
                await receive_numbers(listener, MESSAGES, received)
        assert received == [float(n) for n in range(MESSAGES)], f"cancelled at step {step}"
        step += 1
    assert step > 2


async def _send_slowly(connection: Connection) -> None:
    for number in range(MESSAGES):
        await connection.send(Drain(float(number)))
        await trio.testing.wait_all_tasks_blocked()


@pytest.mark.slow
@MOMENTS
async def test_a_send_cancelled_anywhere_was_sent_or_not_and_we_know_which(
    ends: Ends, moment: Moment
) -> None:
    listener, connection = await ends.linked(hwm=1)
    step, has_struck = 0, True
    while has_struck:
        received: list[int] = []
        sent = 0

        async def victim() -> None:
            nonlocal sent
            while sent < MESSAGES:
                await connection.send(chunk(sent), bytes(400_000))
                sent += 1

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_receive_slowly, listener, received)
                has_struck = await run_cancelled_at(step, moment, victim)
                await victim()
        assert received == list(range(MESSAGES)), f"cancelled at step {step}"
        step += 1
    assert step > 2


async def _receive_slowly(listener: Listener, into: list[int]) -> None:
    while len(into) < MESSAGES:
        await trio.testing.wait_all_tasks_blocked()
        for message in await listener.receive_many(1):
            into.append(getattr(message.frame, "index"))  # noqa: B009
