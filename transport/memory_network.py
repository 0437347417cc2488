"""In-memory links with the interface of zmq_network.py, for tests and simulations.

Frames are really encoded and parsed. With Trio's MockClock hours pass in seconds, and the same seed
gives the same run. memory_pipe.py holds the pipes and their faults (delay, loss, corruption).
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import trio
from trio.lowlevel import ParkingLot

from triolet.errors import ConfigError
from triolet.ids import shown_identity

from .address import address_in_use
from .codec import FrameGate, encode_message
from .gate import BoundGate
from .link import LinkMessage, LinkStatistics, PeerBusy, PeerGone
from .memory_pipe import Conditions, Faults, Inbox, Pipe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .frames import AnyFrame, Goodbye
    from .memory_pipe import Alarm, LinkName

_BOUND_SIDE = b""
"""A connection's name for its one peer."""


class MemoryNetwork:
    """Makes links inside this process. The "processes" of a test share one network.

    Args:
      seed: decides every fault.
      faults: what the network does.

    Attributes:
      conditions: the faults, replaceable at any time, and counts of those that happened.
    """

    def __init__(self, seed: int = 0, faults: Faults | None = None) -> None:
        self.conditions = Conditions(seed, faults if faults is not None else Faults())
        self._listeners: dict[str, MemoryListener] = {}
        self._numbers = count()
        self._connections: dict[MemoryConnection, None] = {}  # in order, unlike a set
        # The last pipe of each name, kept only while `conditions.outlives_links`.
        self._last_pipes: dict[tuple[LinkName, str], Pipe] = {}

    def listen(self, address: str, *, hwm: int, max_frame_bytes: int) -> MemoryListener:
        """Bind; connections that wait for this address connect at once.

        Raises:
          ConfigError: the address is in use.
        """
        if address in self._listeners:
            raise address_in_use(address)
        listener = MemoryListener(
            address, hwm, max_frame_bytes, self.conditions.make_alarm(), self._drop_listener
        )
        self._listeners[address] = listener
        for connection in self._connections:
            if connection.address == address:
                self._attach(connection, listener)
        return listener

    def connect(
        self, address: str, identity: bytes, *, hwm: int, max_frame_bytes: int
    ) -> MemoryConnection:
        """Connect, now or as soon as the address is bound.

        Raises:
          ConfigError: the identity is empty.
        """
        if not identity:
            raise ConfigError("a connection needs an identity")
        connection = MemoryConnection(
            address,
            identity,
            hwm,
            max_frame_bytes,
            self.conditions.make_alarm(),
            self._drop_connection,
        )
        self._connections[connection] = None
        listener = self._listeners.get(address)
        if listener is not None:
            self._attach(connection, listener)
        return connection

    def cut(self, address: str, identity: bytes) -> None:
        """Silently drop every frame of this link from now on, in both directions."""
        self.conditions.cut.add((address, identity))

    def heal(self, address: str, identity: bytes) -> None:
        """Undo `cut`. Dropped frames stay lost."""
        self.conditions.cut.discard((address, identity))

    def close(self) -> None:
        """Close every link."""
        for listener in tuple(self._listeners.values()):
            listener.close()
        for connection in tuple(self._connections):
            connection.close()

    def _attach(self, connection: MemoryConnection, listener: MemoryListener) -> None:
        link = (connection.address, connection.identity)
        # As with sockets, the high-water marks of both sides add up.
        capacity = connection.hwm + listener.hwm
        up = self._pipe(link, "up", capacity, listener.inbox)
        down = self._pipe(link, "down", capacity, connection.inbox)
        number = next(self._numbers).to_bytes(4, "big")
        listener.attach(number, up, down)
        connection.attach(number, up, down)

    def _pipe(self, link: LinkName, direction: str, capacity: int, inbox: Inbox) -> Pipe:
        pipe = Pipe(self.conditions, link, direction, capacity, inbox)
        if self.conditions.outlives_links:
            older = self._last_pipes.get((link, direction))
            if older is not None:
                pipe.inherit(older)
            self._last_pipes[link, direction] = pipe
        return pipe

    def _drop_listener(self, listener: MemoryListener) -> None:
        del self._listeners[listener.address]
        for connection in self._connections:
            if connection.address == listener.address:
                connection.detach()

    def _drop_connection(self, connection: MemoryConnection) -> None:
        del self._connections[connection]
        listener = self._listeners.get(connection.address)
        if listener is not None and connection.number is not None:
            listener.detach(connection.number)
        connection.detach()


class MemoryListener:
    """The bound side. See link.Listener."""

    def __init__(
        self,
        address: str,
        hwm: int,
        max_frame_bytes: int,
        alarm: Alarm,
        on_close: Callable[[MemoryListener], None],
    ) -> None:
        self.hwm = hwm
        self.inbox = Inbox(alarm)
        self._address = address
        self._on_close = on_close
        self._gate = BoundGate(max_frame_bytes, self._refuse)
        self._outgoing: dict[bytes, Pipe] = {}
        self._sent_frames = 0

    @property
    def address(self) -> str:
        """What peers connect to."""
        return self._address

    async def receive_many(self, max_messages: int = 256) -> Sequence[LinkMessage]:
        """Wait for one message, then return all that are there."""
        return await _receive_good(self.inbox, self._gate.admit, max_messages)

    def send_nowait(
        self, to: bytes, frame: AnyFrame, payload: bytes | memoryview | None = None
    ) -> None:
        """Hand a frame to the peer's pipe."""
        parts = encode_message(frame, payload)
        self.inbox.require_open()
        pipe = self._outgoing.get(self._gate.connection_of(to))
        if pipe is None:
            raise PeerGone(f"{shown_identity(to)} is not connected")
        if pipe.is_full:
            raise PeerBusy(f"the pipe to {shown_identity(to)} is full")
        pipe.put(parts)
        self._sent_frames += 1

    def statistics(self) -> LinkStatistics:
        """Return the counters."""
        return self._gate.statistics(self._sent_frames)

    def close(self) -> None:
        """Close the link and drop everything unsent."""
        if not self.inbox.is_closed:
            self.inbox.is_closed = True
            self.inbox.wake()
            self._on_close(self)

    def attach(self, number: bytes, incoming: Pipe, outgoing: Pipe) -> None:
        """Add a connection."""
        self.inbox.pipes[number] = incoming
        self._outgoing[number] = outgoing

    def detach(self, number: bytes) -> None:
        """Remove a connection and drop its frames under way."""
        self.inbox.pipes.pop(number, None)
        self._outgoing.pop(number, None)

    def _refuse(self, number: bytes, frame: Goodbye) -> None:
        pipe = self._outgoing.get(number)
        if pipe is not None and not pipe.is_full:
            pipe.put(encode_message(frame, None))


class MemoryConnection:
    """The connecting side. See link.Connection.

    Attributes:
      address: address of the bound side.
      identity: identity of the connecting side.
      hwm: frames that its pipes hold.
      inbox: where incoming messages wait.
      number: the bound side's name of the present or last connection; None before the first.
      trouble: always empty: nothing keeps two ends in memory apart.
    """

    trouble = ""

    def __init__(
        self,
        address: str,
        identity: bytes,
        hwm: int,
        max_frame_bytes: int,
        alarm: Alarm,
        on_close: Callable[[MemoryConnection], None],
    ) -> None:
        self.address = address
        self.identity = identity
        self.hwm = hwm
        self.inbox = Inbox(alarm)
        self._on_close = on_close
        self.number: bytes | None = None
        self._gate = FrameGate(max_frame_bytes)
        self._outgoing: Pipe | None = None
        self._attached = ParkingLot()
        self._broken = trio.Event()
        self._sent_frames = 0

    async def receive_many(self, max_messages: int = 256) -> Sequence[LinkMessage]:
        """Wait for one message, then return all that are there."""
        return await _receive_good(self.inbox, self._gate.admit, max_messages)

    async def send(self, frame: AnyFrame, payload: bytes | memoryview | None = None) -> None:
        """Wait until connected and until the pipe has room, then hand the frame over."""
        await trio.lowlevel.checkpoint()
        while True:
            try:
                self.send_nowait(frame, payload)
            except PeerBusy:
                await self._wait_for_room()
            except PeerGone:
                if self._outgoing is not None:
                    raise  # cut off, not unconnected
                await self._attached.park()
            else:
                return

    def send_nowait(self, frame: AnyFrame, payload: bytes | memoryview | None = None) -> None:
        """Hand a frame to the pipe, which copies the payload: nothing is claimed."""
        self.send_parts_nowait(encode_message(frame, payload))
        self._sent_frames += 1

    async def wait_broken(self) -> None:
        """Return once the connection has broken since the last call."""
        await self._broken.wait()
        self.inbox.require_open()
        self._broken = trio.Event()

    def send_parts_nowait(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send any parts, even an invalid frame, as an attacker would."""
        self.inbox.require_open()
        if self._outgoing is None or self._gate.is_shut_out(_BOUND_SIDE):
            raise PeerGone(f"{self.address} is not connected, or was cut off")
        if self._outgoing.is_full:
            raise PeerBusy(f"the pipe to {self.address} is full")
        self._outgoing.put(parts)

    def statistics(self) -> LinkStatistics:
        """Return the counters."""
        return LinkStatistics(self._sent_frames, self._gate.received_frames, self._gate.bad_frames)

    def close(self) -> None:
        """Close the link and drop everything unsent."""
        if not self.inbox.is_closed:
            self.inbox.is_closed = True
            self.inbox.wake()
            self._attached.unpark_all()
            self._broken.set()
            self._on_close(self)

    def attach(self, number: bytes, outgoing: Pipe, incoming: Pipe) -> None:
        """Connect to the present bound side."""
        self.number = number
        self._outgoing = outgoing
        self.inbox.pipes[_BOUND_SIDE] = incoming
        self._gate.forgive(_BOUND_SIDE)
        self._attached.unpark_all()

    def detach(self) -> None:
        """Lose the peer and all frames under way in both directions."""
        self.inbox.pipes.clear()
        if self._outgoing is not None:
            outgoing, self._outgoing = self._outgoing, None
            outgoing.room.unpark_all()
            self._broken.set()

    async def _wait_for_room(self) -> None:
        if self._outgoing is not None:
            await self._outgoing.room.park()


async def _receive_good(
    inbox: Inbox,
    admit: Callable[[bytes, Sequence[bytes | memoryview]], LinkMessage | None],
    max_messages: int,
) -> Sequence[LinkMessage]:
    """Return at least one message that passed the gate."""
    while True:
        messages = [
            message
            for sender, parcel in await inbox.take(max_messages)
            if (message := admit(sender, parcel.parts)) is not None
        ]
        if messages:
            return messages
