"""What a link can do, whether ZeroMQ or memory carries it. Knows no sockets.

A Listener is the bound side (many peers), a Connection the connecting side (one peer). Both hand
out frames that are already parsed; what cannot be parsed is dropped, counted, and after
`MAX_BAD_FRAMES` the sender is cut off: nothing more of it is read, and sending to it is PeerGone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from triolet.errors import TrioletError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .frames import AnyFrame

MAX_BAD_FRAMES = 3
"""One bad frame may be a bit flip; three are an enemy or another program."""


class PeerGone(TrioletError):
    """No such peer on this listener: it never said anything, or its pipe is closed."""


class PeerBusy(TrioletError):
    """The peer's pipe is full: it has stopped reading. ROUTER pipes never become 'writable', so
    this is never waited for; the caller treats the peer as failing."""


class Hold(Protocol):
    """A network's claim on the payload of a frame that it was handed."""

    @property
    def done(self) -> bool:
        """Whether the network reads the payload no more, so that it may change."""
        ...


class LinkMessage(NamedTuple):
    """One received frame.

    Attributes:
      sender: name of the peer, as its HELLO said it (PeerId.identity), or a name for its connection
        before that; empty on a Connection.
      frame: what it says.
      payload: KV bytes beside it, or None. The buffer is not aligned: copy, never view as a tensor.
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
        """What peers connect to; the port is filled in where the config said any."""
        ...

    async def receive_many(self, max_messages: int = 256) -> Sequence[LinkMessage]:
        """Wait for one message, then take what else is there. Cancellation loses nothing."""
        ...

    def send_nowait(
        self, to: bytes, frame: AnyFrame, payload: bytes | memoryview | None = None
    ) -> None:
        """Hand a frame to the peer's pipe. The payload is not copied: it must not change any more.

        Raises:
          PeerGone: no such peer.
          PeerBusy: its pipe is full.
        """
        ...

    def statistics(self) -> LinkStatistics:
        """Return the counters."""
        ...

    def close(self) -> None:
        """Close. Idempotent; receivers get ClosedResourceError. What is unsent may be lost."""
        ...


class Connection(Protocol):
    """The connecting side. It reconnects by itself; a new life of the peer says so in WELCOME.

    Frames that were under way to a peer whose connection broke are dropped, never delivered to its
    next life. A peer that was cut off for bad frames is PeerGone until it connects anew. The bound
    side knows each connection anew: after a reconnect HELLO comes first again.
    """

    @property
    def trouble(self) -> str:
        """Why there is no connection, for people; empty if there is one or nothing is known."""
        ...

    async def send(self, frame: AnyFrame, payload: bytes | memoryview | None = None) -> None:
        """Wait until connected and until the pipe has room, then hand the frame over.

        The way to say HELLO: `send_nowait` would find no peer yet. Give it a deadline. Cancelled
        means not sent.
        """
        ...

    async def receive_many(self, max_messages: int = 256) -> Sequence[LinkMessage]:
        """Wait for one message, then take what else is there. Cancellation loses nothing."""
        ...

    def send_nowait(
        self, frame: AnyFrame, payload: bytes | memoryview | None = None
    ) -> Hold | None:
        """Hand a frame to the pipe. The payload is not copied.

        Returns:
          The claim on the payload: it must not change before that is done. None where nothing is
          claimed.

        Raises:
          PeerGone: not connected at present.
          PeerBusy: the pipe is full.
        """
        ...

    async def wait_broken(self) -> None:
        """Return once the connection has broken since this was last called, or since it was made.

        For one task. What was sent just before may be lost; a peer that is frozen or cut off breaks
        nothing.
        """
        ...

    def statistics(self) -> LinkStatistics:
        """Return the counters."""
        ...

    def close(self) -> None:
        """Close. Idempotent; every task that waits gets ClosedResourceError. What is unsent may be
        lost."""
        ...


class Network(Protocol):
    """Makes links. ZmqNetwork in production; MemoryNetwork in tests and simulations."""

    def listen(self, address: str, *, hwm: int, max_frame_bytes: int) -> Listener:
        """Bind. Raises ConfigError naming address and remedy if that is not possible."""
        ...

    def connect(
        self, address: str, identity: bytes, *, hwm: int, max_frame_bytes: int
    ) -> Connection:
        """Connect (and keep connecting). `identity` (PeerId.identity) names the link, to
        people and to the faults of a test; the bound side believes HELLO only."""
        ...

    def close(self) -> None:
        """Close every link that was made here."""
        ...
