"""What is running right now, and who ends it when its client or this process goes.

Knows generations; knows no HTTP. A request holds its generations here and not in
its response, because a response that a client drops is finalised at a time of nobody's choosing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from triolet.errors import RequestError
from triolet.ids import new_request_id

from ..contract.generation import CancelReason
from .stream import NoShortcut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from ..contract.generation import CacheAsk
    from ..tenants.quotas import Ticket
    from .door import BodyHold
    from .stream import Shortcut

SCOPE_KEY: Final = "triolet.live"
"""Where a request's scope holds its RequestScope."""


DEPARTURE_KEY: Final = "triolet.departure"
"""Where the scopes of a connection's requests hold its Departure."""


OWNER_KEY: Final = "triolet.owner"
"""Where such a request's scope holds whose it is: the tenant's name, for it has no key."""


WITHIN_KEY: Final = "triolet.within"
"""Where it holds in how many seconds it is to be done, however long others may take at most."""


CONTINUE_KEY: Final = "triolet.continue"
"""Where they hold what tells the client to send its body, if it waits to be told."""


SHORTCUT_KEY: Final = "triolet.shortcut"
"""Where the scopes of a connection's requests hold its Shortcut, if the connection has one."""


PEER_KEY: Final = "triolet.peer"
"""Where the scopes of a connection's requests hold its Peer; requests from within have none."""


UNIX_PEER: Final = "<local>"
"""Whom a connection of a Unix socket comes from, which only this user has."""


class Peer:
    """The other end of a connection, whatever a proxy says of the client that it asks for. Trust
    follows from this and never from the client's address.

    Args:
      host: its address, or UNIX_PEER; empty if there is no connection.

    Attributes:
      is_forwarding: it has named another client for the whole connection.
      on_key: called when a request has passed the check of keys.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.is_forwarding = False
        self.on_key: Callable[[], None] = _nothing

    @property
    def is_unix(self) -> bool:
        """Whether it is a process of this very user."""
        return self.host == UNIX_PEER


def _nothing() -> None: ...


NO_PEER: Final = Peer("")


def own_peer(scope: Any) -> Peer:  # noqa: ANN401 (ASGI's, of either kind)
    """Return the other end of a request's connection."""
    peer: Peer = scope["state"].get(PEER_KEY, NO_PEER)
    return peer


def own_shortcut(scope: Any) -> Shortcut:  # noqa: ANN401 (ASGI's, of either kind)
    """Return the short way to the client of a request, which may be none at all."""
    shortcut: Shortcut = scope["state"].get(SHORTCUT_KEY) or NoShortcut()
    return shortcut


class Departure:
    """How a client went, for the accounts of what ran for it.

    Attributes:
      reason: set by whoever cuts the connection; otherwise the client went by itself.
    """

    def __init__(self) -> None:
        self.reason = CancelReason.CLIENT_GONE


WAITING: Final = frozenset({b"expect", b"transfer-encoding"})
"""Headers of requests with bodies that wait for leave, however short they are."""

COMING_BACK: Final = frozenset({b"idempotency-key", b"last-event-id"})
"""Headers of requests that may have an answer already."""


class Entry:
    """How far a request has come in, and what it holds until it is queued.

    Args:
      headers: of the request, in lower case; none of a WebSocket's message.

    Attributes:
      expected_bytes: of the body, as its head says; 0 if it does not.
      waits_for_leave: its client does not say how long its body is, or waits to be asked for it.
      may_come_back: it names an answer that may be there already.
      received_bytes: of the body, so far.
      is_decided: it is let in, or turned away.
      is_turned_away: its body is dropped unread.
      is_whole: all of its body came.
      ticket: counts it as under way; None where it does not count.
      hold: of the room that its body takes; None where that is not counted.
    """

    def __init__(self, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self.expected_bytes = self.received_bytes = 0
        self.waits_for_leave = self.may_come_back = False
        for name, value in headers:
            if name == b"content-length":
                self.expected_bytes = int(value)  # the parser of heads lets digits through only
            elif name in WAITING:
                self.waits_for_leave = True
            elif name in COMING_BACK:
                self.may_come_back = True
        self.is_decided = self.is_turned_away = self.is_whole = False
        self.ticket: Ticket | None = None
        self.hold: BodyHold | None = None
        self._changed: trio.Event | None = None

    async def wait_decided(self) -> None:
        """Wait until it is let in, or turned away."""
        while not self.is_decided:
            await self._wait_changed()

    async def wait_whole(self) -> None:
        """Wait until all of its body came."""
        while not self.is_whole:
            await self._wait_changed()

    def decide(self, *, is_turned_away: bool) -> None:
        """Let it in, or drop its body."""
        self.is_decided, self.is_turned_away = True, is_turned_away
        self._wake()

    def complete(self) -> None:
        """Note that nothing more of the body comes."""
        self.is_whole = True
        self._wake()

    @property
    def is_cut(self) -> bool:
        """Whether the rest of the body is not taken: the connection cannot be used again."""
        is_full = self.hold is not None and self.hold.refusal is not None
        return (self.is_turned_away or is_full) and not self.is_whole

    def receive(self, num_bytes: int) -> bool:
        """Count bytes of the body; return whether they are to be kept."""
        self.received_bytes += num_bytes
        return self.hold is None or self.hold.grow_to(self.received_bytes)

    def begin_work(self) -> None:
        """Let the request count from here on, even if nothing comes of it."""
        if self.ticket is not None:
            self.ticket.has_cost = True

    def queue(self) -> None:
        """Let go of everything: the request is queued, or of another server. Idempotent."""
        if self.ticket is not None:
            self.ticket.spare()
        if self.hold is not None:
            self.hold.give_back()

    def leave(self, error: RequestError | None) -> None:
        """Let go of everything: the request is over, maybe by an error. Idempotent."""
        if self.ticket is not None and error is not None and error.status >= 500:
            self.ticket.spare()
        if self.ticket is not None:
            self.ticket.end()
        if self.hold is not None:
            self.hold.give_back()

    async def _wait_changed(self) -> None:
        # Made where a task waits, which is seldom.
        self._changed = self._changed or trio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


class Running(Protocol):
    """Something that a request began: a generation, or a run of inputs."""

    @property
    def has_begun(self) -> bool:
        """Whether anything may have been spent on it."""
        ...

    def cancel(self, reason: CancelReason) -> None:
        """End it now. Idempotent."""
        ...


class RequestScope:
    """One request and what it began. On exit that ends, however it exits.

    Args:
      departure: of its connection.
      headers: as `Entry` takes them.

    Attributes:
      request_id: 16 random bytes.
      began_at: when it came, on trio's clock.
      entry: how far it has come in.
      key: names what it asks for, whoever asks again; 0 before that is known.
      headers: that its response has to have.
      cache: what it says of the response cache, and what came of that.
      is_crowded_out: it was refused, because of what waited or ran already.
    """

    def __init__(self, departure: Departure, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self.request_id = new_request_id()
        self.began_at = trio.current_time()
        self.entry = Entry(headers)
        self.key = 0
        self.headers: dict[str, str] = {}
        self.cache: CacheAsk | None = None
        self.is_crowded_out = False
        self._departure = departure
        self._running: list[Running] = []

    def hold(self, running: Running) -> None:
        """End this with the request."""
        self._running.append(running)

    @property
    def has_begun(self) -> bool:
        """Whether anything may have been spent on it by workers."""
        return any(running.has_begun for running in self._running)

    def __enter__(self) -> RequestScope:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.entry.leave(error if isinstance(error, RequestError) else None)
        for running in self._running:
            running.cancel(self._departure.reason)


class ServerState:
    """Whether this process takes requests, and what is told to those who are connected.

    Attributes:
      leaving: set once this process is about to leave: clients are told to connect anew.
      draining: set once it takes nothing new; answers under way go on.
      has_successor: another process accepts connections at this address now.
    """

    def __init__(self) -> None:
        self.leaving = trio.Event()
        self.draining = trio.Event()
        self.has_successor = False

    @property
    def is_leaving(self) -> bool:
        """Whether clients should look for another connection."""
        return self.leaving.is_set()

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self.draining.is_set()

    def hand_over(self) -> None:
        """Leave new connections to a successor, which listens on the same socket. Idempotent."""
        self.has_successor = self.has_successor or not self.is_leaving
        self.leaving.set()

    def drain(self) -> None:
        """Refuse what is new from now on. Idempotent."""
        self.leaving.set()
        self.draining.set()
