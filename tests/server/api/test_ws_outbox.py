"""Tests of the outbox of a WebSocket: its size in bytes is bounded, messages stay in order, and an
idle socket bypasses it."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from server.api.openai.responses_answer import WsOutbox
from server.api.request_scope import ClientChannel, ClientConnection


class Channel(ClientChannel):
    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def try_send(self, data: bytes) -> bool:
        self.sent.append(data)
        return True


async def test_at_the_bound_of_bytes_whoever_has_more_waits() -> None:
    outbox = WsOutbox(10, ClientConnection())
    sent: list[str] = []
    room = trio.Semaphore(0)

    async def send(text: str) -> None:
        await room.acquire()
        sent.append(text)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(outbox.write, send)
        await outbox.put(b"a" * 100)  # larger than the limit: a message is never split
        await wait_all_tasks_blocked()
        assert not outbox.put_nowait(b"b")
        put = trio.Event()

        async def put_another() -> None:
            await outbox.put(b"c" * 9)
            put.set()

        nursery.start_soon(put_another)
        await wait_all_tasks_blocked()
        assert not put.is_set()
        room.release()
        await put.wait()
        assert outbox.put_nowait(b"d")
        assert not outbox.put_nowait(b"e")
        outbox.close()
        for _ in range(2):
            room.release()
    assert sent == ["a" * 100, "c" * 9, "d"]


async def test_a_closed_one_takes_nothing_and_writes_what_is_left() -> None:
    outbox = WsOutbox(10, ClientConnection(channel=Channel()))
    assert outbox.put_nowait(b"x" * 10)
    async with trio.open_nursery() as nursery:

        async def refused() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await outbox.put(b"late")

        nursery.start_soon(refused)
        await wait_all_tasks_blocked()
        outbox.close()
    assert not outbox.put_nowait(b"late")
    assert not outbox.try_send(b"late")
    sent: list[str] = []

    async def send(text: str) -> None:
        await trio.lowlevel.checkpoint()
        sent.append(text)

    await outbox.write(send)
    assert sent == ["x" * 10]


async def test_nothing_overtakes_what_waits_or_is_being_written() -> None:
    channel = Channel()
    outbox = WsOutbox(10, ClientConnection(channel=channel))
    assert outbox.try_send(b"1")
    assert outbox.put_nowait(b"2")
    assert not outbox.try_send(b"3")
    writing = trio.Event()
    may_end = trio.Event()

    async def send(text: str) -> None:
        writing.set()
        await may_end.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(outbox.write, send)
        await writing.wait()
        assert not outbox.try_send(b"3")
        may_end.set()
        await wait_all_tasks_blocked()
        assert outbox.try_send(b"3")
        outbox.close()
    assert channel.sent == [b"1", b"3"]
