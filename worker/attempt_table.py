"""All attempts that hold a lease on this worker, the one way by which they end, and tombstones,
from which a lost ENDED is answered again in the same words.

Open it to see when blocks are given back. Whether an attempt may begin is decided by the lease
table (transport/lease.py).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar

import structlog

from transport.frames import MAX_TEXT, Ended, EndReason
from transport.lease import LeaseTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.block_ledger import BlockLedger
    from transport.lease import Transitions
    from triolet.config import LinkConfig
    from triolet.ids import AttemptKey, PeerId

    from .outbox import Outbox


class Tombstones:
    """How attempts ended, for a while.

    Args:
      link: how long, and how many at most.
    """

    def __init__(self, link: LinkConfig) -> None:
        self._keep_s = link.tombstone_s
        self._max_words = link.max_tombstones
        # In the order in which they were said, which is the order in which they are forgotten.
        self._said: dict[AttemptKey, tuple[float, Ended]] = {}

    def say(self, ended: Ended, now: float) -> None:
        """Remember an end; the first one of an attempt stands."""
        if ended.key in self._said:
            return
        if len(self._said) >= self._max_words:
            del self._said[next(iter(self._said))]
        self._said[ended.key] = (now, ended)

    def find(self, key: AttemptKey) -> Ended | None:
        """Return how an attempt ended, or None if it is not known to have ended."""
        found = self._said.get(key)
        return None if found is None else found[1]

    def sweep(self, now: float) -> None:
        """Forget what is older than any frame can be under way."""
        while self._said:
            key = next(iter(self._said))
            if now - self._said[key][0] <= self._keep_s:
                return
            del self._said[key]


log = structlog.get_logger()


class TableMember(Protocol):
    """What the attempt table must know of an attempt."""

    @property
    def key(self) -> AttemptKey:
        """Request and attempt number; also the owner of its blocks."""
        ...

    @property
    def server(self) -> PeerId:
        """The life of the server that asked for it."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Completion tokens that exist."""
        ...


A = TypeVar("A", bound=TableMember)


class FailedStep(NamedTuple):
    """A device step that raised.

    Attributes:
      number: of the step, in this life.
      num_rows: attempts that it computed.
    """

    number: int = 0
    num_rows: int = 0


NO_STEP: Final = FailedStep()


class _Departure(NamedTuple, Generic[A]):
    """An attempt that has ended and whose blocks are still to be given back."""

    attempt: A
    reason: EndReason
    message: str
    failed: FailedStep


class AttemptTable(Generic[A]):
    """All attempts that hold a lease here.

    Args:
      ledger: of the blocks that they hold.
      transitions: the table of this role.
      link: lifetimes of leases and tombstones.
      outbox: takes the ENDED frames.
      on_end: told of each attempt that ends, and when, before its blocks go back.

    Attributes:
      attempts: the living ones.
      leases: their leases; ended through `end` only.
      granted: leases since the beginning.
      ended: of these, those that are over; by reason.
    """

    def __init__(
        self,
        ledger: BlockLedger,
        transitions: Transitions,
        link: LinkConfig,
        outbox: Outbox,
        on_end: Callable[[A, float], None],
    ) -> None:
        self.attempts: dict[AttemptKey, A] = {}
        self.leases = LeaseTable(transitions, link)
        self.granted = 0
        self.ended: Counter[EndReason] = Counter()
        self._ledger = ledger
        self._outbox = outbox
        self._on_end = on_end
        self._tombstones = Tombstones(link)
        self._in_step: frozenset[AttemptKey] = frozenset()
        self._leaving: list[_Departure[A]] = []

    @property
    def is_stepping(self) -> bool:
        """Whether the device computes a step."""
        return bool(self._in_step)

    @property
    def num_rows(self) -> int:
        """Attempts in the running step."""
        return len(self._in_step)

    @property
    def leaving(self) -> list[AttemptKey]:
        """Attempts that have ended and whose blocks the running step still uses."""
        return [departure.attempt.key for departure in self._leaving]

    @property
    def is_empty(self) -> bool:
        """Whether nothing lives and nothing is on its way out."""
        return not self.attempts and not self._leaving

    def add(self, attempt: A, now: float, remaining_s: float) -> None:
        """Give an attempt its lease.

        Raises:
          LeaseError: it is over already, or an older attempt of the same request still lives.
        """
        self.leases.reserve(attempt.key, attempt.server, now, remaining_s)
        self.granted += 1
        self.attempts[attempt.key] = attempt

    def end_older(self, key: AttemptKey, now: float) -> None:
        """End the attempt of the same request that this one replaces, if it lives here."""
        older = self.leases.superseded_by(key)
        if older is not None:
            self.end(older, EndReason.SUPERSEDED, now)

    def renew(self, server: PeerId, named: Iterable[AttemptKey], now: float) -> None:
        """Prolong what a server names, and tell it of what is over here."""
        for key in self.leases.renew(server, named, now):
            self.repeat_last_words(server, key)

    def repeat_last_words(self, server: PeerId, key: AttemptKey) -> None:
        """Say again how an attempt ended, or that there is none."""
        if any(departure.attempt.key == key for departure in self._leaving):
            return  # its last words come when the step returns
        ended = self._tombstones.find(key)
        if ended is None:
            ended = Ended(*key, EndReason.UNKNOWN, num_tokens=0, freed_blocks=0)
        self._outbox.to_server(server.identity(), ended)

    def turn_away(
        self, server: PeerId, key: AttemptKey, reason: EndReason, now: float, message: str = ""
    ) -> None:
        """End an attempt that cannot begin here, so that its late frames find it ended."""
        if key in self.attempts:
            self.end(key, reason, now, message)
            return
        self.end_older(key, now)
        self.leases.release(key, now)
        ended = Ended(*key, reason, num_tokens=0, freed_blocks=0, message=message[:MAX_TEXT])
        self._tombstones.say(ended, now)
        self.repeat_last_words(server, key)

    def end(
        self,
        key: AttemptKey,
        reason: EndReason,
        now: float,
        message: str = "",
        failed: FailedStep = NO_STEP,
    ) -> None:
        """End an attempt. Idempotent; what is inside the running step leaves when that returns.

        Args:
          key: which.
          reason: goes to its server.
          now: the time.
          message: for people, with `ERROR`.
          failed: the step that raised, if that is the error.
        """
        if self.leases.release(key, now) is None:
            return
        attempt = self.attempts.pop(key)
        self._on_end(attempt, now)
        departure = _Departure(attempt, reason, message[:MAX_TEXT], failed)
        if key in self._in_step:
            # The device still writes into its blocks.
            self._leaving.append(departure)
        else:
            self._leave(departure, now)

    def end_all(self, reason: EndReason, now: float, message: str = "") -> None:
        """End every attempt."""
        for key in tuple(self.attempts):
            self.end(key, reason, now, message)

    def end_expired(self, now: float) -> None:
        """End what its server no longer wants and what ran out of time."""
        for key, reason in self.leases.expired(now):
            self.end(key, reason, now)
        self._tombstones.sweep(now)

    def begin_step(self, keys: Iterable[AttemptKey]) -> None:
        """Note that the device works on the blocks of these."""
        assert not self._in_step, "one step at a time"
        self._in_step = frozenset(keys)

    def finish_step(self, now: float) -> None:
        """The device is done: give back what ended meanwhile."""
        self._in_step = frozenset()
        leaving, self._leaving = self._leaving, []
        for departure in leaving:
            self._leave(departure, now)

    def check_invariants(self) -> None:
        """Assert that leases, attempts and blocks agree, and the ledger with itself."""
        self._ledger.check_invariants()
        self.check_agreement()

    def check_agreement(self) -> None:
        """Assert that leases, attempts and owners of blocks are the same."""
        leased = {lease.key for lease in self.leases.leases()}
        assert leased == set(self.attempts), "an attempt without a lease, or the other way round"
        leaving = {departure.attempt.key for departure in self._leaving}
        assert leaving <= self._in_step, "an attempt lingers outside the step"
        known = leased | leaving
        holders = sum(self._ledger.has_lease(key) for key in known)
        assert holders == self._ledger.num_leases, "blocks are leased to an unknown attempt"

    def _leave(self, departure: _Departure[A], now: float) -> None:
        attempt, reason, message, failed = departure
        freed_blocks = self._ledger.release(attempt.key)
        self.ended[reason] += 1
        ended = Ended(
            *attempt.key, reason, attempt.num_output_tokens, freed_blocks, message, *failed
        )
        self._tombstones.say(ended, now)
        self._outbox.to_server(attempt.server.identity(), ended)
        log.info(
            "attempt_ended",
            attempt=str(attempt.key),
            reason=reason.value,
            num_tokens=attempt.num_output_tokens,
            freed_blocks=freed_blocks,
            message=message,
        )
