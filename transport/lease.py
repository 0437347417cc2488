"""Leases: which attempt may hold KV blocks on a worker, in which state, and until when.

A lease belongs to one attempt of one request and to the server that requested it. It is renewed
while that server names it in heartbeats, and always ends through `LeaseTable.release`: on finish,
cancel, deadline, silence or a newer attempt. The caller frees the blocks of the lease that
`release` returns, and supplies the clock.

Attempts of a request replace one another, so a request has at most one lease here, and the end of
attempt n ends every attempt up to n. A tombstone is therefore one number per request: an END that
overtakes its RESERVE wins, and a late RESERVE of an older attempt is recognised.

    decode    RESERVED ──first chunk──▶ FILLING ──complete──▶ READY ──start──▶ RUNNING ⇄ PAUSED
              RESERVED ──start──▶ COMPUTING ──complete──▶ READY, where it computes the prompt itself
    prefill   RESERVED ──start──▶ RUNNING ──computed──▶ SHIPPING
    and from every state ──end──▶ RELEASED
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeAlias

from triolet.errors import LeaseError

from .frames import EndReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from triolet.config import LinkConfig
    from triolet.ids import AttemptKey, PeerId


class LeaseState(Enum):
    """State of an attempt on this worker."""

    RESERVED = "reserved"  # blocks are held (decode), the prompt waits (prefill)
    FILLING = "filling"  # decode: KV is arriving
    COMPUTING = "computing"  # decode: it computes the prompt itself
    READY = "ready"  # decode: all KV is here, no row yet
    RUNNING = "running"  # in the device's batch
    PAUSED = "paused"  # decode: out of token credit; keeps its blocks but not its row
    SHIPPING = "shipping"  # prefill: computed, KV is on its way
    RELEASED = "released"


class LeaseEvent(Enum):
    """Events that change the state."""

    FIRST_CHUNK = "first_chunk"
    COMPLETE = "complete"  # decode: all chunks and the manifest arrived, or all is computed
    START = "start"  # it is in a step for the first time
    COMPUTED = "computed"  # prefill: the last prompt token is computed
    PAUSE = "pause"
    RESUME = "resume"
    END = "end"


Transitions: TypeAlias = "Mapping[LeaseState, Mapping[LeaseEvent, LeaseState]]"

_S, _E = LeaseState, LeaseEvent

DECODE_TRANSITIONS: Final[Transitions] = {
    # COMPLETE without a chunk: every block was already held.
    _S.RESERVED: {
        _E.FIRST_CHUNK: _S.FILLING,
        _E.COMPLETE: _S.READY,
        _E.START: _S.COMPUTING,
        _E.END: _S.RELEASED,
    },
    _S.FILLING: {_E.COMPLETE: _S.READY, _E.END: _S.RELEASED},
    _S.COMPUTING: {_E.COMPLETE: _S.READY, _E.END: _S.RELEASED},
    _S.READY: {_E.START: _S.RUNNING, _E.END: _S.RELEASED},
    _S.RUNNING: {_E.PAUSE: _S.PAUSED, _E.END: _S.RELEASED},
    _S.PAUSED: {_E.RESUME: _S.RUNNING, _E.END: _S.RELEASED},
    _S.RELEASED: {},
}
PREFILL_TRANSITIONS: Final[Transitions] = {
    _S.RESERVED: {_E.START: _S.RUNNING, _E.END: _S.RELEASED},
    _S.RUNNING: {_E.COMPUTED: _S.SHIPPING, _E.END: _S.RELEASED},
    _S.SHIPPING: {_E.END: _S.RELEASED},
    _S.RELEASED: {},
}


class Standing(Enum):
    """How an attempt stands on this worker."""

    NEW = "new"
    LIVE = "live"
    ENDED = "ended"


@dataclass(slots=True)
class Lease:
    """One attempt's right to hold blocks here.

    Attributes:
      key: the attempt.
      owner: server process and epoch that asked for it; only that one can renew it.
      granted_at: start time.
      expires_at: when it ends unless renewed.
      deadline: when it ends in any case.
      state: current state.
    """

    key: AttemptKey
    owner: PeerId
    granted_at: float
    expires_at: float
    deadline: float
    state: LeaseState = LeaseState.RESERVED


@dataclass(frozen=True, slots=True)
class _Tombstone:
    """Every attempt of a request up to `attempt` is over."""

    attempt: int
    forget_at: float


class LeaseTable:
    """All leases of one worker.

    Args:
      transitions: DECODE_TRANSITIONS or PREFILL_TRANSITIONS.
      config: uses `lease_ttl_s`, `tombstone_s` and `max_tombstones`.
    """

    def __init__(self, transitions: Transitions, config: LinkConfig) -> None:
        self._transitions = transitions
        self._config = config
        self._live: dict[bytes, Lease] = {}
        self._tombstones: dict[bytes, _Tombstone] = {}  # in the order of forget_at

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_tombstones(self) -> int:
        """Number of ended requests that are remembered."""
        return len(self._tombstones)

    def get(self, key: AttemptKey) -> Lease | None:
        """Return the live lease of exactly this attempt."""
        lease = self._live.get(key.request_id)
        return lease if lease is not None and lease.key == key else None

    def is_live(self, key: AttemptKey) -> bool:
        """Return whether this attempt holds a lease. Frames for attempts without one are
        dropped."""
        return self.get(key) is not None

    def standing(self, key: AttemptKey) -> Standing:
        """Return how an attempt stands. Check before granting a lease."""
        if self.is_live(key):
            return Standing.LIVE
        lease = self._live.get(key.request_id)
        tombstone = self._tombstones.get(key.request_id)
        is_overtaken = lease is not None and lease.key.attempt > key.attempt
        is_buried = tombstone is not None and tombstone.attempt >= key.attempt
        return Standing.ENDED if is_overtaken or is_buried else Standing.NEW

    def superseded_by(self, key: AttemptKey) -> AttemptKey | None:
        """Return the live older attempt that must be released before `key` is reserved."""
        lease = self._live.get(key.request_id)
        return lease.key if lease is not None and lease.key.attempt < key.attempt else None

    def reserve(self, key: AttemptKey, owner: PeerId, now: float, remaining_s: float) -> Lease:
        """Grant a lease, or return the existing one.

        Raises:
          LeaseError: the attempt is over, or an older one still holds its lease.
        """
        standing = self.standing(key)
        if standing is Standing.ENDED:
            raise LeaseError(f"attempt {key} is over")
        older = self.superseded_by(key)
        if older is not None:
            raise LeaseError(f"attempt {older} must be released before {key} is reserved")
        if standing is Standing.LIVE:
            return self._live[key.request_id]
        lease = Lease(key, owner, now, now + self._config.lease_ttl_s, now + remaining_s)
        self._live[key.request_id] = lease
        return lease

    def step(self, key: AttemptKey, event: LeaseEvent) -> LeaseState:
        """Apply an event to a lease and return its new state. END is not allowed here: see
        `release`.

        Raises:
          LeaseError: there is no such lease, or no such transition. Nothing changes.
        """
        lease = self.get(key)
        if lease is None:
            raise LeaseError(f"attempt {key} holds no lease")
        if event is LeaseEvent.END:
            raise LeaseError(f"attempt {key} can be ended only by release")
        following = self._transitions[lease.state].get(event)
        if following is None:
            raise LeaseError(f"attempt {key}: no {event.value} in state {lease.state.value}")
        lease.state = following
        return following

    def release(self, key: AttemptKey, now: float) -> Lease | None:
        """End an attempt and all older ones of its request, even if they never began.

        Returns:
          The ended lease (possibly of an older attempt). The caller frees its blocks. None if
          there was none, and on every further call.
        """
        self._bury(key, now)
        lease = self._live.get(key.request_id)
        if lease is None or lease.key.attempt > key.attempt:
            return None
        lease.state = self._transitions[lease.state][LeaseEvent.END]
        del self._live[key.request_id]
        return lease

    def renew(self, server: PeerId, named: Iterable[AttemptKey], now: float) -> list[AttemptKey]:
        """Prolong the leases that their server names.

        Leases that it does not name simply expire: a heartbeat that was sent before a RESERVE but
        arrives after it must not end that lease.

        Returns:
          Named attempts that hold no lease of this server here; the server should be told.
        """
        unknown = []
        for key in named:
            lease = self.get(key)
            if lease is None or lease.owner != server:
                unknown.append(key)
            else:
                lease.expires_at = max(lease.expires_at, now + self._config.lease_ttl_s)
        return unknown

    def excuse(self, absence_s: float) -> None:
        """Prolong every lease by time in which this worker did not read renewals."""
        for lease in self._live.values():
            lease.expires_at += absence_s

    def expired(self, now: float) -> list[tuple[AttemptKey, EndReason]]:
        """Return the leases to release now, with reasons. Also drop old tombstones."""
        while self._tombstones:
            request_id, tombstone = next(iter(self._tombstones.items()))
            if tombstone.forget_at > now:
                break
            del self._tombstones[request_id]
        return [
            (lease.key, EndReason.DEADLINE if lease.deadline <= now else EndReason.LEASE_EXPIRED)
            for lease in self._live.values()
            if lease.deadline <= now or lease.expires_at <= now
        ]

    def leases(self) -> tuple[Lease, ...]:
        """Return all live leases, oldest first."""
        return tuple(self._live.values())

    def owned_by(self, server: PeerId) -> list[AttemptKey]:
        """Return the attempts of one epoch of a server."""
        return [lease.key for lease in self._live.values() if lease.owner == server]

    def count(self, state: LeaseState) -> int:
        """Return how many leases are in a state."""
        return sum(lease.state is state for lease in self._live.values())

    def _bury(self, key: AttemptKey, now: float) -> None:
        known = self._tombstones.pop(key.request_id, None)
        attempt = key.attempt if known is None else max(key.attempt, known.attempt)
        if len(self._tombstones) >= self._config.max_tombstones:
            del self._tombstones[next(iter(self._tombstones))]
        self._tombstones[key.request_id] = _Tombstone(attempt, now + self._config.tombstone_s)
