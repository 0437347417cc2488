"""What both roles do with the frames of servers: greetings, heartbeats, END, DRAIN; and when a
worker leaves or begins a new life.

Knows the control listener's protocol but for the frames that begin work; those go to the role's
core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, TypeVar

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
    WorkerHeartbeat,
)
from transport.handshake import goodbye
from transport.lease import Standing
from transport.liveness import SelfFence
from triolet.ids import Role

from .counters import Drop
from .peers import PeerTable
from .roster import Member

if TYPE_CHECKING:
    from collections.abc import Callable

    from transport.frames import AnyFrame
    from triolet.audit import WorkerAudit
    from triolet.config import LinkConfig
    from triolet.errors import TrioletError
    from triolet.ids import AttemptKey, PeerId

    from .counters import Counters
    from .identity import Identity
    from .outbox import Outbox
    from .roster import Roster

log = structlog.get_logger()

SHUT_DOWN: Final = "this worker has shut down"
"""The reason of the GOODBYE after a drain."""

A = TypeVar("A", bound=Member)


class Reception(Generic[A]):
    """The side of a worker that servers see.

    Args:
      identity: who answers.
      link: lifetimes.
      roster: who holds a lease.
      outbox: takes the answers.
      counters: of what came.
      describe: how things stand, with the credit of one server.
      account: everything that an audit asks for.
      now: the time at which the worker begins.

    Attributes:
      servers: those that have said HELLO.
      operators: commands that have; they hold no leases and have no share of the credit.
      is_draining: nothing new is taken.
    """

    def __init__(
        self,
        identity: Identity,
        link: LinkConfig,
        roster: Roster[A],
        outbox: Outbox,
        counters: Counters,
        describe: Callable[[PeerId], WorkerHeartbeat],
        account: Callable[[float], WorkerAudit],
        now: float,
    ) -> None:
        # A server that is silent for longer has lost its leases here and is greeted anew.
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
        self._roster = roster
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
        """Whether leases have ended, and their blocks gone back, since the last heartbeat."""
        return self._roster.ended.total() != self._num_reported

    @property
    def is_drained(self) -> bool:
        """Whether the worker may leave."""
        return self.is_draining and self._roster.is_empty

    @property
    def is_heard(self) -> bool:
        """Whether everybody who was told that this worker leaves has taken note, or is gone."""
        return not self._farewells

    def is_fenced(self, now: float) -> bool:
        """Note that the loop runs; return whether it stood still for longer than leases last."""
        return self._fence.beat(now)

    def excuse(self) -> float:
        """After a shorter standstill: count it in nobody's silence; return how long it was."""
        absence_s = self._fence.absence_s
        if absence_s:
            log.warning("stood_still", seconds=round(absence_s, 3))
            self._roster.leases.excuse(absence_s)
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
                self._roster.renew(server, (row.key for row in live), now)
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
        """End what a server has here: it left, or a frame to it was lost, and after a gap its
        streams cannot go on exactly. If it lives it is told when it names them again."""
        if self._farewells:
            self._farewells.discard(sender)
        self.operators.forget(sender)
        server = self.servers.forget(sender)
        if server is not None:
            tell = log.info if has_said_so else log.warning
            tell("server_gone", server=str(server))
            for key in self._roster.leases.owned_by(server):
                self._roster.end(key, EndReason.LEASE_EXPIRED, now)

    def reject(self, server: PeerId, frame: AnyFrame, error: TrioletError, now: float) -> None:
        """Answer a frame that cannot be acted upon."""
        log.warning("frame_rejected", server=str(server), error=str(error))
        self._counters.drop(Drop.REJECTED)
        if isinstance(frame, AttemptFrame):
            attempt = self._roster.attempts.get(frame.key)
            if attempt is None or attempt.server == server:
                self._roster.turn_away(server, frame.key, EndReason.ERROR, now, str(error))

    def beat(self) -> None:
        """Tell every server and operator how things stand."""
        self._num_reported = self._roster.ended.total()
        for sender, peer in (*self.servers.known(), *self.operators.known()):
            self._outbox.to_server(sender, self._describe(peer))

    def drain(self, now: float, deadline_s: float) -> None:
        """Take nothing new; end what is left after `deadline_s`. The earliest deadline counts."""
        until = now + deadline_s
        self._drain_deadline = min(until, self._drain_deadline or until)
        if not self.is_draining:
            self.is_draining = True
            log.info("draining", deadline_s=deadline_s)
            # At once, so that servers send nothing more that would only be turned away.
            self.beat()

    def sweep(self, now: float) -> None:
        """End what is over: expired leases, deadlines, silent servers, the drain."""
        self._roster.end_expired(now)
        self.servers.forget_silent(now)
        self.operators.forget_silent(now)
        if self._drain_deadline is not None and now >= self._drain_deadline:
            self._roster.end_all(EndReason.DRAIN, now)

    def begin_new_life(self, now: float) -> None:
        """Drop everything: whoever gave us work has taken it elsewhere by now."""
        log.warning("fenced", epoch=self._identity.me.epoch)
        self._roster.end_all(EndReason.LEASE_EXPIRED, now)
        reason = "this worker stood still for longer than its leases: say HELLO again"
        self.servers.dismiss(reason)
        self.operators.dismiss(reason)
        self._identity.begin_new_life()

    def say_goodbye(self) -> None:
        """Tell everybody that this worker leaves; `is_heard` says whether they know."""
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
            # Who greets again has given this worker up, and everything that it had here.
            for key in self._roster.leases.owned_by(peer):
                self._roster.end(key, EndReason.LEASE_EXPIRED, now)
            # At once, so that it may dispatch without waiting for the next heartbeat.
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
        attempt = self._roster.attempts.get(key)
        if attempt is None:
            if self._roster.leases.standing(key) is Standing.ENDED:
                self._roster.repeat_last_words(server, key)
            else:
                # It overtook the frame that begins the attempt, which will find it ended.
                self._roster.turn_away(server, key, reason, now)
        elif attempt.server == server:
            self._roster.end(key, reason, now)
        else:
            self._counters.drop(Drop.FOREIGN)
