"""A worker's sessions with servers: greetings, heartbeats, audits, drain, and peers that fall
silent.

`PeerTable` is the part for any listener: handshakes and timeouts of its peers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

import structlog

from transport.frames import (
    AttemptFrame,
    Audit,
    Audited,
    Drain,
    End,
    EndReason,
    Goodbye,
    Hello,
    ServerHeartbeat,
    Welcome,
    WorkerHeartbeat,
)
from transport.handshake import answer_hello, goodbye
from transport.lease import Standing
from transport.liveness import SelfFence
from triolet.ids import Role

from .attempt_table import TableMember
from .counters import Drop

if TYPE_CHECKING:
    from collections.abc import Callable

    from transport.frames import AnyFrame
    from triolet.audit import WorkerAudit
    from triolet.config import LinkConfig
    from triolet.errors import TrioletError
    from triolet.ids import AttemptKey, PeerId

    from .attempt_table import AttemptTable
    from .counters import Counters
    from .identity import Identity
    from .outbox import Outbox


class _Known(NamedTuple):
    peer: PeerId
    heard_at: float


class PeerTable:
    """The peers that may send frames.

    Args:
      identity: identity of this worker.
      expected: role that may connect here.
      silence_s: a peer that is silent for this long is forgotten.
      max_peers: beyond this number a new HELLO is refused.
      send: takes a routing id and a frame.
      welcome: makes the final decision on a peer that may connect.
    """

    def __init__(
        self,
        identity: Identity,
        expected: Role,
        *,
        silence_s: float,
        max_peers: int,
        send: Callable[[bytes, AnyFrame], None],
        welcome: Callable[[bytes, Hello, Welcome], Welcome | Goodbye] = lambda _s, _h, plain: plain,
    ) -> None:
        self._identity = identity
        self._expected = expected
        self._silence_s = silence_s
        self._max_peers = max_peers
        self._send = send
        self._welcome = welcome
        self._known: dict[bytes, _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, sender: bytes) -> bool:
        return sender in self._known

    def known(self) -> list[tuple[bytes, PeerId]]:
        """Return routing id and name of every peer."""
        return [(sender, known.peer) for sender, known in self._known.items()]

    def greet(self, sender: bytes, hello: Hello, now: float) -> bool:
        """Answer a HELLO; return whether the peer was welcomed."""
        answer = answer_hello(
            hello,
            me=self._identity.me,
            expected=(self._expected,),
            fingerprint=self._identity.fingerprint,
            capacity=self._identity.capacity,
            kv_address=self._identity.kv_address,
            labels=self._identity.labels,
        )
        if isinstance(answer, Welcome):
            if sender in self._known or len(self._known) < self._max_peers:
                answer = self._welcome(sender, hello, answer)
            else:
                answer = goodbye(
                    f"{self._identity.me} has reached its limit of {self._max_peers} peers"
                )
        if isinstance(answer, Welcome):
            self._known[sender] = _Known(hello.peer.peer_id, now)
        self._send(sender, answer)
        return isinstance(answer, Welcome)

    def hear(self, sender: bytes, now: float) -> PeerId | None:
        """Return the sender; ask an unknown one for a HELLO and return None."""
        known = self._known.get(sender)
        if known is None:
            self._send(sender, goodbye(f"{self._identity.me} does not know you: send HELLO"))
            return None
        self._known[sender] = _Known(known.peer, now)
        return known.peer

    def forget(self, sender: bytes) -> PeerId | None:
        """Drop a peer that sent GOODBYE or lost its connection; return it if known."""
        known = self._known.pop(sender, None)
        return None if known is None else known.peer

    def excuse(self, absence_s: float) -> None:
        """Do not count time in which this worker did not listen."""
        for sender, known in self._known.items():
            self._known[sender] = _Known(known.peer, known.heard_at + absence_s)

    def forget_silent(self, now: float) -> None:
        """Drop peers that have been silent for too long."""
        silent = [s for s, k in self._known.items() if now - k.heard_at > self._silence_s]
        for sender in silent:
            self.forget(sender)

    def dismiss(self, reason: str) -> None:
        """Send GOODBYE to all peers and forget them."""
        for sender in tuple(self._known):
            self._send(sender, goodbye(reason, is_farewell=True))
            self.forget(sender)


log = structlog.get_logger()

SHUT_DOWN: Final = "this worker has shut down"
"""The reason of the GOODBYE after a drain."""

A = TypeVar("A", bound=TableMember)


class ServerSessions(Generic[A]):
    """A worker's sessions with its servers.

    Args:
      identity: identity of this worker.
      link: lifetimes.
      attempt_table: the attempts with leases.
      outbox: takes the answers.
      counters: counters of received frames.
      describe: returns a heartbeat for one server.
      account: returns the account for an audit.
      now: time at which the worker starts.

    Attributes:
      servers: servers that have sent HELLO.
      operators: commands that have sent HELLO; they hold no leases and get no credit.
      is_draining: whether it accepts no new work.
    """

    def __init__(
        self,
        identity: Identity,
        link: LinkConfig,
        attempt_table: AttemptTable[A],
        outbox: Outbox,
        counters: Counters,
        describe: Callable[[PeerId], WorkerHeartbeat],
        account: Callable[[float], WorkerAudit],
        now: float,
    ) -> None:
        # A server that is silent for longer has lost its leases here and must greet again.
        self.servers = PeerTable(
            identity,
            Role.SERVER,
            silence_s=link.lease_ttl_s,
            max_peers=link.max_peers,
            send=outbox.to_server,
        )
        self.operators = PeerTable(
            identity,
            Role.OPERATOR,
            silence_s=link.lease_ttl_s,
            max_peers=link.max_operators,
            send=outbox.to_server,
        )
        self.is_draining = False
        self._identity = identity
        self._attempt_table = attempt_table
        self._outbox = outbox
        self._counters = counters
        self._describe = describe
        self._account = account
        self._fence = SelfFence(link, now, link.lease_ttl_s)
        self._drain_deadline: float | None = None
        self._farewells: set[bytes] | None = None
        self._num_reported = 0

    @property
    def has_news(self) -> bool:
        """Return whether leases have ended and their blocks are free since the last heartbeat."""
        return self._attempt_table.ended.total() != self._num_reported

    @property
    def is_drained(self) -> bool:
        """Return whether the worker may leave."""
        return self.is_draining and self._attempt_table.is_empty

    @property
    def is_heard(self) -> bool:
        """Return whether every peer has acknowledged the worker's farewell, or is gone."""
        return not self._farewells

    def is_fenced(self, now: float) -> bool:
        """Record that the loop runs. Return whether it was stopped for longer than a lease."""
        return self._fence.beat(now)

    def excuse(self) -> float:
        """Do not count a shorter stop as silence of peers. Return its duration."""
        absence_s = self._fence.absence_s
        if absence_s:
            log.warning("process_paused", seconds=round(absence_s, 3))
            self._attempt_table.leases.excuse(absence_s)
            self.servers.excuse(absence_s)
        return absence_s

    def take(self, sender: bytes, frame: AnyFrame, now: float) -> PeerId | None:
        """Handle a frame that every worker understands.

        Returns:
          The server that sent it, if the frame is one for the role's core; else None.
        """
        if isinstance(frame, Goodbye):
            self.on_server_gone(sender, now, has_said_so=True)
            return None
        if self._farewells is not None:
            self._outbox.to_server(sender, goodbye(SHUT_DOWN, is_farewell=True))
            return None
        if isinstance(frame, Hello):
            self._greet(sender, frame, now)
            return None
        if sender in self.operators:
            self._obey(sender, frame, now)
            return None
        server = self.servers.hear(sender, now)
        if server is None:
            self._counters.drop(Drop.STRANGER)
            return None
        match frame:
            case ServerHeartbeat(live=live):
                self._attempt_table.renew(server, (row.key for row in live), now)
            case End(reason=reason):
                self._end(server, frame.key, reason, now)
            case Drain(deadline_s=deadline_s):
                self.drain(now, deadline_s)
            case Audit(serial=serial):
                self._give_account(sender, serial, now)
            case _:
                return server
        return None

    def on_server_gone(self, sender: bytes, now: float, *, has_said_so: bool = False) -> None:
        """End a server's attempts: it left, or a frame to it was lost, and its streams cannot
        continue exactly after a gap. If it is alive, it learns this when it names them again."""
        if self._farewells:
            self._farewells.discard(sender)
        self.operators.forget(sender)
        server = self.servers.forget(sender)
        if server is not None:
            tell = log.info if has_said_so else log.warning
            tell("server_gone", server=str(server))
            for key in self._attempt_table.leases.owned_by(server):
                self._attempt_table.end(key, EndReason.LEASE_EXPIRED, now)

    def reject(self, server: PeerId, frame: AnyFrame, error: TrioletError, now: float) -> None:
        """Answer an invalid frame."""
        log.warning("frame_rejected", server=str(server), error=str(error))
        self._counters.drop(Drop.REJECTED)
        if isinstance(frame, AttemptFrame):
            attempt = self._attempt_table.attempts.get(frame.key)
            if attempt is None or attempt.server == server:
                self._attempt_table.turn_away(server, frame.key, EndReason.ERROR, now, str(error))

    def beat(self) -> None:
        """Send a heartbeat to every server and operator."""
        self._num_reported = self._attempt_table.ended.total()
        for sender, peer in (*self.servers.known(), *self.operators.known()):
            self._outbox.to_server(sender, self._describe(peer))

    def drain(self, now: float, deadline_s: float) -> None:
        """Accept no new work; end what is left after `deadline_s`. The earliest deadline
        applies."""
        until = now + deadline_s
        self._drain_deadline = min(until, self._drain_deadline or until)
        if not self.is_draining:
            self.is_draining = True
            log.info("draining", deadline_s=deadline_s)
            # Immediately, so that servers send no more requests that would only be refused.
            self.beat()

    def sweep(self, now: float) -> None:
        """End what is due: expired leases, deadlines, silent servers, the drain."""
        self._attempt_table.end_expired(now)
        self.servers.forget_silent(now)
        self.operators.forget_silent(now)
        if self._drain_deadline is not None and now >= self._drain_deadline:
            self._attempt_table.end_all(EndReason.DRAIN, now)

    def begin_new_life(self, now: float) -> None:
        """Drop everything: servers have given the work to other workers by now."""
        log.warning("fenced", epoch=self._identity.me.epoch)
        self._attempt_table.end_all(EndReason.LEASE_EXPIRED, now)
        reason = "this worker stood still for longer than its leases: send HELLO again"
        self.servers.dismiss(reason)
        self.operators.dismiss(reason)
        self._identity.begin_new_life()

    def say_goodbye(self) -> None:
        """Notify all peers that this worker is leaving. `is_heard` is true once they know."""
        known = (*self.servers.known(), *self.operators.known())
        self._farewells = {sender for sender, _ in known}
        self.servers.dismiss(SHUT_DOWN)
        self.operators.dismiss(SHUT_DOWN)

    def _greet(self, sender: bytes, hello: Hello, now: float) -> None:
        peer = hello.peer.peer_id
        if peer.role is Role.OPERATOR:
            self.operators.greet(sender, hello, now)
        elif self.servers.greet(sender, hello, now):
            log.info("server_greeted", server=str(peer))
            # A server that greets again has given up all its attempts here.
            for key in self._attempt_table.leases.owned_by(peer):
                self._attempt_table.end(key, EndReason.LEASE_EXPIRED, now)
            # Immediately, so that it can dispatch without waiting for the next heartbeat.
            self._outbox.to_server(sender, self._describe(peer))

    def _obey(self, sender: bytes, frame: AnyFrame, now: float) -> None:
        self.operators.hear(sender, now)
        match frame:
            case Drain(deadline_s=deadline_s):
                self.drain(now, deadline_s)
            case Audit(serial=serial):
                self._give_account(sender, serial, now)
            case _:
                self._counters.drop(Drop.UNEXPECTED)

    def _give_account(self, sender: bytes, serial: int, now: float) -> None:
        self._outbox.to_server(sender, Audited(serial, self._account(now)))

    def _end(self, server: PeerId, key: AttemptKey, reason: EndReason, now: float) -> None:
        attempt = self._attempt_table.attempts.get(key)
        if attempt is None:
            if self._attempt_table.leases.standing(key) is Standing.ENDED:
                self._attempt_table.repeat_last_words(server, key)
            else:
                # It overtook the frame that begins the attempt, which will be refused.
                self._attempt_table.turn_away(server, key, reason, now)
        elif attempt.server == server:
            self._attempt_table.end(key, reason, now)
        else:
            self._counters.drop(Drop.FOREIGN)
