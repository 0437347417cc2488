"""One ZeroMQ socket that Trio tasks may wait on, and be cancelled on, without loss.

Knows how libzmq signals; knows no frames and no peers. What it is built on:

- The socket's file descriptor is edge-triggered, and the edge is shared by both directions. Any
  call on the socket, even asking for its state, may take the edge that another task waits for.
- So one task at a time, the leader, waits for the descriptor; the others park. After each
  operation the state is read again and whoever can go on is woken. When the leader leaves, for
  whatever reason, all who are parked look for themselves and one of them leads.
- Asking costs a system call, and more than taking a message does; a failing call costs twice that.
  So the state is remembered for as long as nothing was done with the socket since: what comes later
  makes the descriptor readable.
- Messages are taken, and handed over, after the last checkpoint of a call: cancelled means that
  nothing happened, and several receivers see messages in their order.
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
"""Parts of a message that are kept: routing id, frame, payload, and one more that shows that there
were too many."""


MIN_SHARED_BYTES: Final = 64 * KIB
"""Below it a part is copied: sharing costs a message to another thread, which frees it."""


class ZmqSocket:
    """A pyzmq socket inside Trio. Any number of tasks may send and receive at once.

    Args:
      raw: the socket; owned from now on, and used by nobody else.
      copied_parts: leading parts of a message that are small: copied into bytes. What follows is
        handed out as a view on ZeroMQ's own buffer.
      has_user_ids: each message is to begin with one part more, what ZAP called its sender.
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
        """Wait for one message, then take what else is there; a message is a list of parts.

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
        """Wait until the pipe takes the message. Cancelled means not sent.

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
        """Hand over all parts or none. Large ones are not copied.

        Returns:
          Whether libzmq still reads the last part; None if it was copied.

        Raises:
          trio.WouldBlock: no pipe, or it is full.
          trio.BrokenResourceError: a ROUTER has no such peer.
          trio.ClosedResourceError: `close` was called.
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
            # Can come at the first part only, or when the pipe breaks between two parts; libzmq
            # then takes back what it had of the message.
            raise trio.WouldBlock from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise trio.BrokenResourceError from error
            raise
        finally:
            self._touched()

    def close(self) -> None:
        """Close. Idempotent; whoever waits gets ClosedResourceError. What is unsent may still leave
        for as long as the socket was told to linger."""
        if self._is_closed:
            return
        self._is_closed = True
        # The leader must have left the descriptor before it is closed.
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
            # Most come alone, and then asking is cheaper than failing.
            if max_messages == 1 or not self._look() & READABLE:
                return messages
            while len(messages) < max_messages:
                messages.append(self._take_one())
        self._touched()
        return messages

    def _take_one(self) -> list[bytes | memoryview]:
        """Return one message. All its parts are there once the first is: libzmq is atomic."""
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
        """Wait for the descriptor, or until another task saw that `event` holds."""
        self._has_leader, self._leader_event = True, event
        try:
            with suppress(trio.ClosedResourceError):  # so `_wake_leader` wakes
                await trio.lowlevel.wait_readable(self._fd)
        finally:
            self._has_leader, self._leader_event = False, 0
            self._state = None
            self._unpark_all()

    def _look(self) -> int:
        """Return what the socket is ready for. Others whose edge this takes are woken."""
        if self._state is None:
            self._state = int(self._raw.get(zmq.EVENTS))
            self._wake_ready(self._state)
        return self._state

    def _touched(self) -> None:
        """Note that something was done with the socket, which may have taken an edge."""
        self._state = None
        if self._has_leader:  # without one nobody waits
            self._look()

    def _wake_ready(self, events: int) -> None:
        """Wake whoever can go on."""
        if events & self._leader_event:
            self._wake_leader()
        for event, lot in self._parked.items():
            if events & event:
                lot.unpark_all()

    def _wake_leader(self) -> None:
        """Let the leader, if there is one, look for itself. This is how Trio calls somebody back
        from a descriptor; a cancel scope around each wait would cost more than the wait."""
        if self._has_leader:
            self._leader_event = 0
            trio.lowlevel.notify_closing(self._fd)

    def _unpark_all(self) -> None:
        for lot in self._parked.values():
            lot.unpark_all()
