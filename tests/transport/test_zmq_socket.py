"""Tests of the Trio adapter for ZeroMQ sockets under stress: tiny high-water marks, many tasks per
socket, cancellations anywhere.

Runs with and without cancellation: deadlines also wake tasks that a lost edge has left asleep.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trio
import zmq

from transport.zmq_socket import WRITABLE, ZmqSocket

from .ends import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KINDS = ("inproc", "ipc", "tcp")
SENDERS = 2
RECEIVERS = 3
SIZES = (1, 100, 3000)


class Pair:
    """Two connected DEALER sockets."""

    def __init__(self, address: str, hwm: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        left, right = self._socket(hwm), self._socket(hwm)
        left.bind(address)
        right.connect(left.getsockopt_string(zmq.LAST_ENDPOINT))
        self.ends = (ZmqSocket(left, copied_parts=1), ZmqSocket(right, copied_parts=1))

    def _socket(self, hwm: int) -> zmq.Socket[bytes]:
        raw = self.context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            raw.set(option, hwm)
        raw.set(zmq.LINGER, 0)
        return raw

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self.context.term()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture(params=[2, 3])
def pair(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> Iterator[Pair]:
    address = {
        "inproc": "inproc://pair",
        "ipc": f"ipc://{tmp_path}/pair",
        "tcp": "tcp://127.0.0.1:*",
    }[kind]
    opened = Pair(address, request.param)
    yield opened
    opened.close()


class Torture:
    """Messages in both directions at once, each numbered by its sender."""

    def __init__(self, pair: Pair, count: int, *, is_cancelling: bool) -> None:
        self.pair = pair
        self.count = count
        self.is_cancelling = is_cancelling
        self.random = random.Random(count)
        self.cancelled = 0
        self.received: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
        self.done = {0: trio.Event(), 1: trio.Event()}

    def scope(self) -> trio.CancelScope:
        scope = trio.CancelScope()
        if self.is_cancelling:
            draw = self.random.random()
            if draw < 0.3:
                scope.deadline = trio.current_time() + self.random.random() * 2e-4
            elif draw < 0.35:
                scope.cancel()
        return scope

    async def send(self, end: int, sender: int) -> None:
        number = 0
        while number < self.count:
            body = b"x" * self.random.choice(SIZES)
            with self.scope() as scope:
                await self.pair.ends[end].send([b"%d %d" % (sender, number), body])
                number += 1
            self.cancelled += scope.cancelled_caught

    async def receive(self, end: int) -> None:
        received = self.received[end]
        while len(received) < SENDERS * self.count:
            messages: list[list[bytes | memoryview]] = []
            with self.scope() as scope:
                messages = await self.pair.ends[end].receive_many(self.random.choice((1, 5, 50)))
            self.cancelled += scope.cancelled_caught
            for head, body in messages:
                assert len(body) in SIZES
                sender, number = bytes(head).split()
                received.append((int(sender), int(number)))
        self.done[end].set()

    async def run(self) -> None:
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for end in (0, 1):
                    for sender in range(SENDERS):
                        nursery.start_soon(self.send, end, sender)
                    for _ in range(RECEIVERS):
                        nursery.start_soon(self.receive, end)
                for done in self.done.values():
                    await done.wait()
                nursery.cancel_scope.cancel()

    def assert_complete(self) -> None:
        for received in self.received.values():
            for sender in range(SENDERS):
                numbers = [number for who, number in received if who == sender]
                assert numbers == list(range(self.count))


@pytest.mark.slow
async def test_without_cancellation_nothing_is_lost_and_nothing_hangs(pair: Pair) -> None:
    torture = Torture(pair, 500, is_cancelling=False)
    await torture.run()
    torture.assert_complete()


@pytest.mark.slow
async def test_under_cancellation_nothing_is_lost_doubled_or_reordered(pair: Pair) -> None:
    torture = Torture(pair, 400, is_cancelling=True)
    await torture.run()
    torture.assert_complete()
    assert torture.cancelled > 20


async def test_a_waiter_is_woken_although_another_call_took_the_edge(pair: Pair) -> None:
    left, right = pair.ends
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:

            async def receive_one() -> None:
                assert await left.receive_many(1) == [[b"to the left"]]
                nursery.cancel_scope.cancel()

            nursery.start_soon(receive_one)
            await trio.testing.wait_all_tasks_blocked()
            await right.send([b"to the left"])
            # Sending on the waiting socket reads its mailbox and so takes the waiter's edge.
            while True:
                with suppress(trio.WouldBlock):
                    left.send_nowait([b"noise"])
                await trio.lowlevel.checkpoint()


@pytest.fixture
def full_pair() -> Iterator[Pair]:
    """Two sockets without an I/O thread between them, so that each edge comes when the test says;
    the pipe from left to right is full."""
    opened = Pair("inproc://full", 1)
    left = opened.ends[0]
    with suppress(trio.WouldBlock):
        while True:
            left.send_nowait([b"full"])
    yield opened
    opened.close()


async def test_taking_a_message_wakes_a_sender_whose_edge_it_took(full_pair: Pair) -> None:
    left, right = full_pair.ends
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(left.send, [b"at last"])
            await trio.testing.wait_all_tasks_blocked()
            # From here to the end of the block nothing else runs: one edge stands for both events.
            assert right._take(10)
            right.send_nowait([b"hello"])
            assert left._take(10) == [[b"hello"]]


async def test_looking_for_room_wakes_a_receiver_whose_edge_it_took(full_pair: Pair) -> None:
    left, right = full_pair.ends
    received: list[list[bytes | memoryview]] = []

    async def receive() -> None:
        received.extend(await left.receive_many(10))
        nursery.cancel_scope.cancel()

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            right.send_nowait([b"hello"])
            await left._wait_until(WRITABLE)
    assert received == [[b"hello"]]


async def test_parts_beyond_what_anybody_wants_are_not_kept(pair: Pair) -> None:
    left, right = pair.ends
    with trio.fail_after(PATIENCE_S):
        await right.send([b"part"] * 1000)
        await right.send([b"next"])
        [many] = await left.receive_many(1)
        assert len(many) == 4
        assert await left.receive_many(1) == [[b"next"]]


async def test_a_large_part_is_handed_out_without_a_copy(pair: Pair) -> None:
    left, right = pair.ends
    with trio.fail_after(PATIENCE_S):
        await right.send([b"head", bytes(1_000_000)])
        [[head, body]] = await left.receive_many(1)
    assert isinstance(head, bytes)
    assert isinstance(body, memoryview)
    assert body.nbytes == 1_000_000
