"""Interfaces of links: Listener (bound side, many peers), Connection (connecting side) and Network.

zmq_network.py implements them with sockets, memory_network.py in memory. Both return parsed frames.
Invalid frames are dropped and counted. After `MAX_BAD_FRAMES` the sender is cut off: its frames are
no longer read, and sending to it raises PeerGone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from triolet.errors import TrioletError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .frames import AnyFrame

MAX_BAD_FRAMES = 3
"""One bad frame may be a bit flip; three mean an attack or another program."""


class PeerGone(TrioletError):
    """This listener has no such peer: it never sent anything, or its pipe is closed."""


class PeerBusy(TrioletError):
    """The peer's pipe is full: it has stopped reading. ROUTER pipes never become writable, so
    callers do not wait; they treat the peer as failing."""


class Hold(Protocol):
    """The network's claim on a payload that it was handed."""

    @property
    def done(self) -> bool:
        """Return whether the network no longer reads the payload, so that it may change."""
        ...


class LinkMessage(NamedTuple):
    """One received frame.

    Attributes:
      sender: name of the peer from its HELLO (PeerId.identity), or before that a name of its
        connection; empty on a Connection.
      frame: the frame.
      payload: its KV bytes, or None. The buffer is not aligned: copy it, never view it as a
        tensor.
    """

    sender: bytes
    frame: AnyFrame
    payload: memoryview | None


class LinkStatistics(NamedTuple):
    """Counters of one link since it was opened."""

    sent_frames: int
    received_frames: int
    bad_frames: int


class Listener(Protocol):
    """The bound side."""

    @property
    def address(self) -> str:
        """The address for peers, with the actual port."""
        ...

    async def receive_many(self, max_messages: int = 256) -> Sequence[LinkMessage]:
        """Wait for one message, then return all that are there. Cancellation loses nothing."""
        ...

    def send_nowait(
        self, to: bytes, frame: AnyFrame, payload: bytes | memoryview | None = None
    ) -> None:
        """Hand a frame to the peer's pipe. The payload is not copied and must not change
        afterwards.

        Raises:
          PeerGone: no such peer.
          PeerBusy: its pipe is full.
        """
        ...

    def statistics(self) -> LinkStatistics:
        """Return the counters."""
        ...

    def close(self) -> None:
        """Close the link. Idempotent; receivers get ClosedResourceError. Unsent frames may be
        lost."""
        ...


class Connection(Protocol):
    """The connecting side. It reconnects by itself; WELCOME shows whether the peer has restarted.

    Frames under way when a connection breaks are dropped and never reach a restarted peer. A peer
    that was cut off for bad frames is PeerGone until it reconnects. To the bound side each
    reconnect is a new connection: send HELLO again first.
    """

    @property
    def trouble(self) -> str:
        """Why there is no connection, for messages; empty if there is one or the reason is
        unknown."""
        ...

    async def send(self, frame: AnyFrame, payload: bytes | memoryview | None = None) -> None:
        """Wait until connected and until the pipe has room, then hand the frame over.

        Use this for HELLO: `send_nowait` would find no peer yet. Give it a deadline. If cancelled,
        the frame was not sent.
        """
        ...

    async def receive_many(self, max_messages: int = 256) -> Sequence[LinkMessage]:
        """Wait for one message, then return all that are there. Cancellation loses nothing."""
        ...

    def send_nowait(
        self, frame: AnyFrame, payload: bytes | memoryview | None = None
    ) -> Hold | None:
        """Hand a frame to the pipe. The payload is not copied.

        Returns:
          The claim on the payload, which must not change before it is done; None if nothing is
          claimed.

        Raises:
          PeerGone: not connected at present.
          PeerBusy: the pipe is full.
        """
        ...

    async def wait_broken(self) -> None:
        """Return once the connection has broken since the last call, or since it was made.

        For one task only. Frames sent just before may be lost. A frozen or cut-off peer does not
        count as a break.
        """
        ...

    def statistics(self) -> LinkStatistics:
        """Return the counters."""
        ...

    def close(self) -> None:
        """Close the link. Idempotent; waiting tasks get ClosedResourceError. Unsent frames may be
        lost."""
        ...


class Network(Protocol):
    """Makes links. ZmqNetwork in production; MemoryNetwork in tests and simulations."""

    def listen(self, address: str, *, hwm: int, max_frame_bytes: int) -> Listener:
        """Bind. Raises ConfigError with the address and a remedy if that fails."""
        ...

    def connect(
        self, address: str, identity: bytes, *, hwm: int, max_frame_bytes: int
    ) -> Connection:
        """Connect and keep connecting. `identity` (PeerId.identity) names the link in messages and
        test faults; the bound side trusts only HELLO."""
        ...

    def close(self) -> None:
        """Close every link that was made here."""
        ...
