"""A request while it runs: its connection, what it holds, and the one place where all of it ends.

A request holds its streams here and not in its response, because a response that a client drops is
finalised at a time that nothing determines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from triolet.errors import RequestError
from triolet.ids import new_request_id

from ..contract.generation import CacheAsk, CancelReason

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from ..tenants.quotas import Ticket
    from .door import BodyHold
    from .served_models import ServedModel

SCOPE_KEY: Final = "triolet"
"""Where the state of an ASGI scope holds its RequestScope."""

UNIX_PEER: Final = "<local>"
"""The other end of a Unix socket, which only this user has."""


class ClientChannel:
    """Leads to a client past the application (server/edge/http.py). This one leads nowhere: its
    request is from within, or its connection has ended."""

    def try_send(self, data: bytes) -> bool:
        """Send a piece of the body of a response, or one text message of a WebSocket in UTF-8. It
        neither waits nor raises.

        Returns:
          False if nothing was done: there is no room, something else is being written, or this is
          no moment for it. Then the piece goes the usual way.
        """
        del data
        return False

    async def ask_for_body(self) -> None:
        """Tell the client to send its body, if it waits to be told."""
        await trio.lowlevel.checkpoint()

    def note_key(self) -> None:
        """Note that a request has passed the check of keys."""


class ClientConnection:
    """A client's connection, as the requests on it see it.

    Trust follows from its other end and never from the client's address.

    Args:
      host: address of the other end, whatever a proxy says of the client, or UNIX_PEER; empty for
        requests from within, which have no connection.
      channel: leads to it; None for one that leads nowhere.

    Attributes:
      host: as above.
      is_forwarding: the other end has named another client for the whole connection.
      disconnect_reason: how the client went; CLIENT_GONE unless the connection was cut.
      channel: as above.
    """

    def __init__(self, host: str = "", channel: ClientChannel | None = None) -> None:
        self.host = host
        self.is_forwarding = False
        self.disconnect_reason = CancelReason.CLIENT_GONE
        self.channel = channel or ClientChannel()

    @property
    def is_unix(self) -> bool:
        """Whether the other end is a process of this very user."""
        return self.host == UNIX_PEER

    def let_go(self) -> None:
        """Part from the protocol, which holds this connection as well."""
        self.channel = ClientChannel()


WAITING: Final = frozenset({b"expect", b"transfer-encoding"})
"""Headers of requests with bodies that wait for leave, however short they are."""

COMING_BACK: Final = frozenset({b"idempotency-key", b"last-event-id"})
"""Headers of requests that may have an answer already."""


class RequestEntry:
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
      connection: of its client.
      headers: as `RequestEntry` takes them.
      owner: tenant of a request from within, which has no key; None for a client's.
      within_s: in which a request from within is to be done; None for a client's.

    Attributes:
      request_id: 16 random bytes.
      began_at: when it came, on Trio's clock.
      connection: as above.
      owner: as above.
      within_s: as above.
      entry: how far it has come in.
      key: names what it asks for, so that a retry is known; 0 before that is known.
      headers: that its response has to have.
      versions: that routes gave it, by the model's name: a route that moves leaves it where it is.
      cache: what it says of the response cache, and what came of that.
      while_client_stays: cancelled once the client is gone.
      is_crowded_out: it was refused, because of what waited or ran already.
    """

    def __init__(
        self,
        connection: ClientConnection,
        headers: Iterable[tuple[bytes, bytes]] = (),
        *,
        owner: str | None = None,
        within_s: float | None = None,
    ) -> None:
        self.request_id = new_request_id()
        self.began_at = trio.current_time()
        self.connection = connection
        self.owner = owner
        self.within_s = within_s
        self.entry = RequestEntry(headers)
        self.key = 0
        self.headers: dict[str, str] = {}
        self.versions: dict[str, ServedModel] = {}
        self.cache: CacheAsk | None = None
        self.while_client_stays = trio.CancelScope()
        self.is_crowded_out = False
        self._running: list[Running] = []
        self._num_ended = 0

    def note_client_gone(self) -> None:
        """End what the request began, and cancel what runs for the client: it is gone, or has its
        answer. Idempotent."""
        # First, so that who waits for what ends here is cancelled instead of told of that end.
        self.while_client_stays.cancel()
        self._end_running()

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
        self._end_running()

    def _end_running(self) -> None:
        """End each thing once, also what was begun after the client had gone."""
        for running in self._running[self._num_ended :]:
            running.cancel(self.connection.disconnect_reason)
        self._num_ended = len(self._running)


def scope_of(scope: Any) -> RequestScope:  # noqa: ANN401 (ASGI's, of either kind)
    """Return the RequestScope of an ASGI scope."""
    found: RequestScope = scope["state"][SCOPE_KEY]
    return found


class ServerState:
    """Whether this process takes requests, and what it tells connected clients.

    Attributes:
      leaving: set once this process is about to leave: clients are told to connect anew.
      draining: set once it takes nothing new; answers under way go on.
      has_successor: another process accepts connections at this address now.
      was_ready: it said once that a request had workers to go to.
    """

    def __init__(self) -> None:
        self.leaving = trio.Event()
        self.draining = trio.Event()
        self.has_successor = self.was_ready = False

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
