"""One ZeroMQ socket that Trio tasks can wait on, and be cancelled on, without losing messages.

- The socket's file descriptor is edge-triggered, and both directions share the edge. Any call on
  the socket, even reading its state, may take the edge that another task waits for.
- So one task at a time, the leader, waits for the descriptor; the others park. After each operation
  the state is read again and every task that can proceed is woken. When the leader leaves, all
  parked tasks check for themselves, and one of them becomes the leader.
- Reading the state is a system call and costs more than receiving a message; a failing call costs
  twice that. So the state is remembered until the next operation on the socket: any later change
  makes the descriptor readable.
- Messages are received and sent after the last checkpoint of a call: if cancelled, nothing
  happened, and several receivers see messages in order.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio
import zmq
from trio.lowlevel import ParkingLot

from triolet.units import KIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .link import Hold

READABLE: Final = int(zmq.POLLIN)
WRITABLE: Final = int(zmq.POLLOUT)
MAX_PARTS: Final = 4
"""Message parts that are kept: routing id, frame, payload, and one more to detect too many."""


MIN_SHARED_BYTES: Final = 64 * KIB
"""Smaller parts are copied: sharing costs a message to another thread, which frees the memory."""


class ZmqSocket:
    """A pyzmq socket inside Trio. Any number of tasks may send and receive at once.

    Args:
      raw: the socket, owned by this object.
      copied_parts: leading parts of a message that are small and copied into bytes. Later parts
        are views on ZeroMQ's own buffer.
      has_user_ids: prefix each message with ZAP's user id of its sender.
    """

    def __init__(
        self, raw: zmq.Socket[bytes], copied_parts: int, *, has_user_ids: bool = False
    ) -> None:
        self._raw = raw
        self._copied_parts = copied_parts
        self._has_user_ids = has_user_ids
        self._fd = int(raw.get(zmq.FD))
        self._has_leader = False
        self._leader_event = 0
        self._parked = {READABLE: ParkingLot(), WRITABLE: ParkingLot()}
        self._state: int | None = None
        self._is_closed = False

    async def receive_many(self, max_messages: int) -> list[list[bytes | memoryview]]:
        """Wait for one message, then return all that are there; a message is a list of parts.

        Raises:
          trio.ClosedResourceError: `close` was called.
        """
        self._check_open()
        if self._look() & READABLE:
            await trio.lowlevel.checkpoint()
        else:
            await self._wait_until(READABLE)
        while not (messages := self._take(max_messages)):
            await self._wait_until(READABLE)
        return messages

    async def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Wait until the pipe takes the message. If cancelled, it was not sent.

        Raises:
          trio.ClosedResourceError: `close` was called.
        """
        await trio.lowlevel.checkpoint()
        while True:
            try:
                self.send_nowait(parts)
            except trio.WouldBlock:
                await self._wait_until(WRITABLE)
            else:
                return

    def send_nowait(self, parts: Sequence[bytes | memoryview]) -> Hold | None:
        """Send all parts or none. Large ones are not copied.

        Returns:
          Whether libzmq still reads the last part; None if it was copied.

        Raises:
          trio.WouldBlock: there is no pipe, or it is full. trio.BrokenResourceError: a ROUTER has
          no such peer. trio.ClosedResourceError: `close` was called.
        """
        self._check_open()
        *first, last = parts
        try:
            for part in first:
                self._raw.send(part, zmq.NOBLOCK | zmq.SNDMORE)
            if len(last) < MIN_SHARED_BYTES:
                self._raw.send(last, zmq.NOBLOCK)
                return None
            return self._raw.send(last, zmq.NOBLOCK, copy=False, track=True)
        except zmq.Again:
            # Only possible at the first part, or if the pipe breaks between two parts; libzmq then
            # discards the parts that it already has.
            raise trio.WouldBlock from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise trio.BrokenResourceError from error
            raise
        finally:
            self._touched()

    def close(self) -> None:
        """Close the socket. Idempotent; waiting tasks get ClosedResourceError. Unsent messages may
        still leave while the socket lingers."""
        if self._is_closed:
            return
        self._is_closed = True
        # The leader must leave the descriptor before it is closed.
        self._wake_leader()
        self._unpark_all()
        self._raw.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError("this socket was closed")

    def _take(self, max_messages: int) -> list[list[bytes | memoryview]]:
        self._check_open()
        messages: list[list[bytes | memoryview]] = []
        with suppress(zmq.Again):  # that was all of them
            messages.append(self._take_one())
            self._touched()
            # Most messages come alone; then checking is cheaper than failing.
            if max_messages == 1 or not self._look() & READABLE:
                return messages
            while len(messages) < max_messages:
                messages.append(self._take_one())
        self._touched()
        return messages

    def _take_one(self) -> list[bytes | memoryview]:
        """Return one message. libzmq delivers all its parts at once."""
        raw = self._raw
        parts: list[bytes | memoryview]
        if self._has_user_ids:
            first = raw.recv(zmq.NOBLOCK, copy=False)
            parts = [str(first.get("User-Id")).encode(), first.bytes]
        else:
            parts = [raw.recv(zmq.NOBLOCK)]
        num_more = len(parts) - 1
        while raw.get(zmq.RCVMORE):
            if len(parts) < self._copied_parts + num_more:
                parts.append(raw.recv(zmq.NOBLOCK))
                continue
            frame = raw.recv(zmq.NOBLOCK, copy=False)
            if len(parts) < MAX_PARTS + num_more:
                parts.append(frame.buffer)
        return parts

    async def _wait_until(self, event: int) -> None:
        """Return when the socket is ready for `event`; another task may still be faster."""
        while True:
            self._check_open()
            if self._look() & event:
                return
            if self._has_leader:
                await self._parked[event].park()
            else:
                await self._lead(event)

    async def _lead(self, event: int) -> None:
        """Wait for the descriptor, or until another task has seen `event`."""
        self._has_leader, self._leader_event = True, event
        try:
            with suppress(trio.ClosedResourceError):  # so `_wake_leader` wakes
                await trio.lowlevel.wait_readable(self._fd)
        finally:
            self._has_leader, self._leader_event = False, 0
            self._state = None
            self._unpark_all()

    def _look(self) -> int:
        """Return what the socket is ready for. Wakes other tasks if this takes their edge."""
        if self._state is None:
            self._state = int(self._raw.get(zmq.EVENTS))
            self._wake_ready(self._state)
        return self._state

    def _touched(self) -> None:
        """Record that an operation on the socket may have taken an edge."""
        self._state = None
        if self._has_leader:  # without one no task waits
            self._look()

    def _wake_ready(self, events: int) -> None:
        """Wake every task that can proceed."""
        if events & self._leader_event:
            self._wake_leader()
        for event, lot in self._parked.items():
            if events & event:
                lot.unpark_all()

    def _wake_leader(self) -> None:
        """Make the leader, if any, check for itself. Trio can call a task back from a descriptor
        this way; a cancel scope around each wait would cost more than the wait."""
        if self._has_leader:
            self._leader_event = 0
            trio.lowlevel.notify_closing(self._fd)

    def _unpark_all(self) -> None:
        for lot in self._parked.values():
            lot.unpark_all()
