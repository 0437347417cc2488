"""A running request: its client connection, the resources it holds, and their release.

A request holds its streams here and not in its response, because a response that a client drops is
finalized at an unpredictable time.
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

    from ..contract.generation import AssignedVersion
    from ..rollouts.conversations import Conversation
    from ..tenants.quotas import Ticket
    from .door import BodyHold
    from .served_models import ServedModel

SCOPE_KEY: Final = "triolet"
"""Key of the RequestScope in the state of an ASGI scope."""

UNIX_PEER: Final = "<local>"
"""The other end of a Unix socket, which is accessible only to this user."""


class ClientChannel:
    """A direct way to write to a client, past the application (server/edge/http.py). This base
    class goes nowhere: for internal requests and ended connections."""

    def try_send(self, data: bytes) -> bool:
        """Send a part of a response body, or a WebSocket text message in UTF-8. Never waits or
        raises.

        Returns:
          False if nothing was sent: there is no room, another write is in progress, or the protocol
          does not allow it now. The caller then sends it through the application.
        """
        del data
        return False

    async def ask_for_body(self) -> None:
        """Send `100 Continue` if the client waits for it."""
        await trio.lowlevel.checkpoint()

    def note_key(self) -> None:
        """Record that a request has passed the key check."""


class ClientConnection:
    """A client's connection, as its requests see it.

    Trust depends on the connection's other end, never on the client address from a header.

    Args:
      host: address of the other end, whatever a proxy reports, or UNIX_PEER; empty for internal
        requests, which have no connection.
      channel: direct channel to the client; None for none.

    Attributes:
      host: see Args.
      is_forwarding: whether the other end named another client for the whole connection.
      disconnect_reason: how the client disconnected; CLIENT_GONE unless the connection was cut.
      channel: see Args.
    """

    def __init__(self, host: str = "", channel: ClientChannel | None = None) -> None:
        self.host = host
        self.is_forwarding = False
        self.disconnect_reason = CancelReason.CLIENT_GONE
        self.channel = channel or ClientChannel()

    @property
    def is_unix(self) -> bool:
        """Whether the other end is a process of the same user."""
        return self.host == UNIX_PEER

    def let_go(self) -> None:
        """Drop the reference to the protocol, which also references this connection."""
        self.channel = ClientChannel()


WAITING: Final = frozenset({b"expect", b"transfer-encoding"})
"""Headers of requests with bodies that wait for permission, regardless of size."""

COMING_BACK: Final = frozenset({b"idempotency-key", b"last-event-id"})
"""Headers of requests that may already have an answer."""


class RequestEntry:
    """The admission state of a request, and what it holds until it is queued.

    Args:
      headers: request headers in lower case; empty for a WebSocket message.

    Attributes:
      expected_bytes: the body's announced size; 0 if unknown.
      waits_for_leave: whether the client sent no size or waits for permission to send the body.
      may_come_back: whether its answer may already exist.
      received_bytes: bytes of the body so far.
      is_decided: whether it was admitted or refused.
      is_turned_away: whether its body is dropped unread.
      is_whole: whether the complete body has arrived.
      ticket: counts it as in flight; None if it is not counted.
      hold: the room reserved for its body; None if it is not counted.
      owner_url: URL of the host that holds its answer; empty for this host.
    """

    def __init__(self, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self.expected_bytes = self.received_bytes = 0
        self.waits_for_leave = self.may_come_back = False
        for name, value in headers:
            if name == b"content-length":
                self.expected_bytes = int(value)  # the request parser checked the digits
            elif name in WAITING:
                self.waits_for_leave = True
            elif name in COMING_BACK:
                self.may_come_back = True
        self.is_decided = self.is_turned_away = self.is_whole = False
        self.ticket: Ticket | None = None
        self.hold: BodyHold | None = None
        self.owner_url = ""
        self._changed: trio.Event | None = None

    async def wait_decided(self) -> None:
        """Wait until it is admitted or refused."""
        while not self.is_decided:
            await self._wait_changed()

    async def wait_whole(self) -> None:
        """Wait until the complete body has arrived."""
        while not self.is_whole:
            await self._wait_changed()

    def decide(self, *, is_turned_away: bool) -> None:
        """Admit it, or drop its body."""
        self.is_decided, self.is_turned_away = True, is_turned_away
        self._wake()

    def complete(self) -> None:
        """Record that the body is complete."""
        self.is_whole = True
        self._wake()

    @property
    def is_cut(self) -> bool:
        """Whether the rest of the body is not read, so that the connection cannot be reused."""
        is_full = self.hold is not None and self.hold.refusal is not None
        return (self.is_turned_away or is_full) and not self.is_whole

    def receive(self, num_bytes: int) -> bool:
        """Count bytes of the body; return whether to keep them."""
        self.received_bytes += num_bytes
        return self.hold is None or self.hold.grow_to(self.received_bytes)

    def begin_work(self) -> None:
        """Count the request against its quota from here on, whatever its outcome."""
        if self.ticket is not None:
            self.ticket.has_cost = True

    def queue(self) -> None:
        """Release everything because the request is queued here or by a peer. Idempotent."""
        if self.ticket is not None:
            self.ticket.spare()
        if self.hold is not None:
            self.hold.give_back()

    def leave(self, error: RequestError | None) -> None:
        """Release everything because the request has ended, possibly in an error. Idempotent."""
        if self.ticket is not None and error is not None and error.status >= 500:
            self.ticket.spare()
        if self.ticket is not None:
            self.ticket.end()
        if self.hold is not None:
            self.hold.give_back()

    async def _wait_changed(self) -> None:
        # Created only when a task waits, which is rare.
        self._changed = self._changed or trio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


class Running(Protocol):
    """Work that a request started: a generation or an embedding run."""

    @property
    def has_begun(self) -> bool:
        """Whether workers may have started on it."""
        ...

    def cancel(self, reason: CancelReason) -> None:
        """Cancel it now. Idempotent."""
        ...


class RequestScope:
    """One request and the work that it started. Leaving the context cancels that work.

    Args:
      connection: the client's connection.
      headers: see `RequestEntry`.
      owner: the tenant of an internal request, which has no key; None for a client's.
      within_s: the time limit of an internal request; None for a client's.
      once_id: see `Settlement`; empty for a client's request.

    Attributes:
      request_id: 16 random bytes.
      began_at: arrival time on Trio's clock.
      connection: see Args.
      owner: see Args.
      within_s: see Args.
      once_id: see Args.
      entry: its admission state.
      key: identifies its content to recognize retries; 0 until known.
      headers: headers to add to its response.
      conversation: what routes choose its versions by; None, and the stable version, for a request
        without a body, and while there are no routes.
      versions: versions chosen by routes, by model name, so that a route change does not move it.
      assigned: those of them that are evidence about versions, by public name.
      cache: its response cache settings and outcome.
      while_client_stays: cancelled when the client is gone.
      is_crowded_out: whether it was refused because of other waiting or running requests.
    """

    def __init__(
        self,
        connection: ClientConnection,
        headers: Iterable[tuple[bytes, bytes]] = (),
        *,
        owner: str | None = None,
        within_s: float | None = None,
        once_id: str = "",
    ) -> None:
        self.request_id = new_request_id()
        self.began_at = trio.current_time()
        self.connection = connection
        self.owner = owner
        self.within_s = within_s
        self.once_id = once_id
        self.entry = RequestEntry(headers)
        self.key = 0
        self.headers: dict[str, str] = {}
        self.conversation: Conversation | None = None
        self.versions: dict[str, ServedModel] = {}
        self.assigned: dict[str, AssignedVersion] = {}
        self.cache: CacheAsk | None = None
        self.while_client_stays = trio.CancelScope()
        self.is_crowded_out = False
        self._running: list[Running] = []
        self._num_ended = 0

    def note_client_gone(self) -> None:
        """Cancel the request's work and what waits for it: the client is gone or has its response.
        Idempotent."""
        # First, so that tasks that wait for the work are cancelled before they see it end.
        self.while_client_stays.cancel()
        self._end_running()

    def hold(self, running: Running) -> None:
        """Cancel this work when the request ends."""
        self._running.append(running)

    @property
    def has_begun(self) -> bool:
        """Whether workers may have started on the request."""
        return any(running.has_begun for running in self._running)

    @property
    def has_work(self) -> bool:
        """Whether it was submitted, or joined what another one submitted."""
        return bool(self._running)

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
        """Cancel everything once, including work started after the client left."""
        for running in self._running[self._num_ended :]:
            running.cancel(self.connection.disconnect_reason)
        self._num_ended = len(self._running)


def scope_of(scope: Any) -> RequestScope:  # noqa: ANN401 (ASGI's, of either kind)
    """Return the RequestScope of an ASGI scope."""
    found: RequestScope = scope["state"][SCOPE_KEY]
    return found


class ServerState:
    """Whether this process accepts requests, and its shutdown stage.

    Attributes:
      leaving: set when the process is about to shut down: clients are told to reconnect.
      draining: set when it refuses new requests; running ones continue.
      has_successor: whether another process accepts connections at this address.
      was_ready: whether it has ever reported ready.
    """

    def __init__(self) -> None:
        self.leaving = trio.Event()
        self.draining = trio.Event()
        self.has_successor = self.was_ready = False

    @property
    def is_leaving(self) -> bool:
        """Whether clients should reconnect."""
        return self.leaving.is_set()

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self.draining.is_set()

    def hand_over(self) -> None:
        """Leave new connections to a successor that listens on the same socket. Idempotent."""
        self.has_successor = self.has_successor or not self.is_leaving
        self.leaving.set()

    def drain(self) -> None:
        """Refuse new requests from now on. Idempotent."""
        self.leaving.set()
        self.draining.set()
