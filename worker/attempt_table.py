"""All attempts with a lease on this worker, their end, and tombstones of ended ones.

Open it to see when blocks are freed: every attempt ends in `AttemptTable.end`. Tombstones repeat a
lost ENDED unchanged. The lease table (transport/lease.py) decides whether an attempt may begin.
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
    """Remembers for a while how attempts ended.

    Args:
      link: lifetimes and limits.
    """

    def __init__(self, link: LinkConfig) -> None:
        self._keep_s = link.tombstone_s
        self._max_words = link.max_tombstones
        # In order of insertion, which is also the order of expiry.
        self._said: dict[AttemptKey, tuple[float, Ended]] = {}

    def say(self, ended: Ended, now: float) -> None:
        """Record an end; the first one of an attempt is kept."""
        if ended.key in self._said:
            return
        if len(self._said) >= self._max_words:
            del self._said[next(iter(self._said))]
        self._said[ended.key] = (now, ended)

    def find(self, key: AttemptKey) -> Ended | None:
        """Return how an attempt ended, or None if unknown."""
        found = self._said.get(key)
        return None if found is None else found[1]

    def sweep(self, now: float) -> None:
        """Forget ends older than any frame under way."""
        while self._said:
            key = next(iter(self._said))
            if now - self._said[key][0] <= self._keep_s:
                return
            del self._said[key]


log = structlog.get_logger()


class TableMember(Protocol):
    """What the attempt table needs of an attempt."""

    @property
    def key(self) -> AttemptKey:
        """Request and attempt number; also the owner of its blocks."""
        ...

    @property
    def server(self) -> PeerId:
        """Server and epoch that asked for it."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Number of completion tokens."""
        ...


A = TypeVar("A", bound=TableMember)


class FailedStep(NamedTuple):
    """A device step that raised.

    Attributes:
      number: number of the step, in this epoch.
      num_rows: attempts in it.
    """

    number: int = 0
    num_rows: int = 0


NO_STEP: Final = FailedStep()


class _Departure(NamedTuple, Generic[A]):
    """An ended attempt with blocks that the running step still uses."""

    attempt: A
    reason: EndReason
    message: str
    failed: FailedStep


class AttemptTable(Generic[A]):
    """All attempts with a lease here.

    Args:
      ledger: ledger of their blocks.
      transitions: the table of this role.
      link: lifetimes of leases and tombstones.
      outbox: takes the ENDED frames.
      on_end: called with each attempt that ends, and when, before its blocks are freed.

    Attributes:
      attempts: live attempts.
      leases: their leases; they end only through `end`.
      granted: leases granted since the start.
      ended: ended leases, by reason.
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
        """Return whether the device computes a step."""
        return bool(self._in_step)

    @property
    def num_rows(self) -> int:
        """Attempts in the running step."""
        return len(self._in_step)

    @property
    def leaving(self) -> list[AttemptKey]:
        """Ended attempts with blocks that the running step still uses."""
        return [departure.attempt.key for departure in self._leaving]

    @property
    def is_empty(self) -> bool:
        """Return whether no attempt is live or leaving."""
        return not self.attempts and not self._leaving

    def add(self, attempt: A, now: float, remaining_s: float) -> None:
        """Grant an attempt its lease.

        Raises:
          LeaseError: it is already over, or an older attempt of the same request is live.
        """
        self.leases.reserve(attempt.key, attempt.server, now, remaining_s)
        self.granted += 1
        self.attempts[attempt.key] = attempt

    def end_older(self, key: AttemptKey, now: float) -> None:
        """End the attempt of the same request that this one replaces, if it is live here."""
        older = self.leases.superseded_by(key)
        if older is not None:
            self.end(older, EndReason.SUPERSEDED, now)

    def renew(self, server: PeerId, named: Iterable[AttemptKey], now: float) -> None:
        """Prolong the leases that a server names, and tell it which of them are over."""
        for key in self.leases.renew(server, named, now):
            self.repeat_last_words(server, key)

    def repeat_last_words(self, server: PeerId, key: AttemptKey) -> None:
        """Resend to a server how an attempt ended, or that it is unknown."""
        if any(departure.attempt.key == key for departure in self._leaving):
            return  # ENDED follows when the step returns
        ended = self._tombstones.find(key)
        if ended is None:
            ended = Ended(*key, EndReason.UNKNOWN, num_tokens=0, freed_blocks=0)
        self._outbox.to_server(server.identity(), ended)

    def turn_away(
        self, server: PeerId, key: AttemptKey, reason: EndReason, now: float, message: str = ""
    ) -> None:
        """Record the end of an attempt that cannot begin here, so that its late frames are
        dropped."""
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
        """End an attempt. Idempotent. If it is in the running step, its blocks are freed after the
        step.

        Args:
          key: the attempt.
          reason: reported to its server.
          now: current time.
          message: for people, with `ERROR`.
          failed: the step that is the cause, if one is.
        """
        if self.leases.release(key, now) is None:
            return
        attempt = self.attempts.pop(key)
        self._on_end(attempt, now)
        departure = _Departure(attempt, reason, message[:MAX_TEXT], failed)
        if key in self._in_step:
            # The device still writes to its blocks.
            self._leaving.append(departure)
        else:
            self._leave(departure, now)

    def end_all(self, reason: EndReason, now: float, message: str = "") -> None:
        """End every attempt."""
        for key in tuple(self.attempts):
            self.end(key, reason, now, message)

    def end_expired(self, now: float) -> None:
        """End attempts that their server no longer wants, or that are past their deadline."""
        for key, reason in self.leases.expired(now):
            self.end(key, reason, now)
        self._tombstones.sweep(now)

    def begin_step(self, keys: Iterable[AttemptKey]) -> None:
        """Record that the device uses the blocks of these attempts."""
        assert not self._in_step, "one step at a time"
        self._in_step = frozenset(keys)

    def finish_step(self, now: float) -> None:
        """Record the end of the step, and free the blocks of attempts that ended during it."""
        self._in_step = frozenset()
        leaving, self._leaving = self._leaving, []
        for departure in leaving:
            self._leave(departure, now)

    def check_invariants(self) -> None:
        """Assert that leases, attempts and blocks agree, and that the ledger is consistent."""
        self._ledger.check_invariants()
        self.check_agreement()

    def check_agreement(self) -> None:
        """Assert that leases, attempts and owners of blocks are the same set."""
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
