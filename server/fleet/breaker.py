"""Whether a worker that fails is given a rest: one circuit breaker per worker.

Knows outcomes and time; does not know what a worker is nor why an attempt failed. A worker is left
out while its breaker is open; after a cool-down one attempt tries it. A new life of a worker begins
with its breaker closed, whatever the old one did.

    CLOSED ──trip──▶ OPEN ──cooled──▶ HALF_OPEN ──succeeded──▶ CLOSED
                       ▲────────failed───────┘
    and from every state ──reset──▶ CLOSED

Never more than half of a pool is left out (`ejected`): when most workers fail it is not the
workers, and the few that are left would drown.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeVar

from triolet.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from triolet.config_recovery import RecoveryConfig
    from triolet.ids import AttemptKey

T = TypeVar("T")

MAX_OUTCOMES: Final = 20
"""Outcomes that are remembered; half of them must be failures."""


class BreakerState(Enum):
    """What a worker may be given."""

    CLOSED = "closed"  # anything
    OPEN = "open"  # nothing
    HALF_OPEN = "half_open"  # one attempt at a time, until one has an outcome


class BreakerEvent(Enum):
    """What changes it."""

    TRIPPED = "tripped"  # too many of the last outcomes are failures
    COOLED = "cooled"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    RESET = "reset"  # the worker has a new life


_S, _E = BreakerState, BreakerEvent

TRANSITIONS: Final[Mapping[BreakerState, Mapping[BreakerEvent, BreakerState]]] = {
    _S.CLOSED: {
        _E.TRIPPED: _S.OPEN,
        _E.SUCCEEDED: _S.CLOSED,
        _E.FAILED: _S.CLOSED,
        _E.RESET: _S.CLOSED,
    },
    # What began before it opened, or runs there because half of the pool must stay, proves nothing.
    _S.OPEN: {
        _E.COOLED: _S.HALF_OPEN,
        _E.SUCCEEDED: _S.OPEN,
        _E.FAILED: _S.OPEN,
        _E.RESET: _S.CLOSED,
    },
    _S.HALF_OPEN: {_E.SUCCEEDED: _S.CLOSED, _E.FAILED: _S.OPEN, _E.RESET: _S.CLOSED},
}


def next_state(state: BreakerState, event: BreakerEvent) -> BreakerState:
    """Return the state that follows.

    Raises:
      LocalProtocolError: the table has no such step.
    """
    following = TRANSITIONS[state].get(event)
    if following is None:
        raise LocalProtocolError(f"a breaker that is {state.value} cannot be {event.value}")
    return following


class Breaker:
    """The outcomes of one worker's present life, and what follows from them.

    Attributes:
      state: as of the last call.
      opened_at: when it opened last.
      probe: the attempt that tries the worker, while HALF_OPEN.
    """

    def __init__(self, config: RecoveryConfig) -> None:
        self.state = BreakerState.CLOSED
        self.opened_at = 0.0
        self.probe: AttemptKey | None = None
        self._config = config
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=MAX_OUTCOMES)
        self._cooldown_s = config.breaker_cooldown_s

    @property
    def is_admitting(self) -> bool:
        """Whether the worker may be given an attempt."""
        is_free_to_try = self.state is BreakerState.HALF_OPEN and self.probe is None
        return self.state is BreakerState.CLOSED or is_free_to_try

    def succeeded(self, now: float) -> None:
        """Note that an attempt got what it wanted of the worker."""
        was = self.state
        self._apply(BreakerEvent.SUCCEEDED)
        if was is BreakerState.HALF_OPEN:
            self._forget()
        elif was is BreakerState.CLOSED:
            self._outcomes.append((now, True))

    def failed(self, now: float) -> None:
        """Note a fault of the worker. Attempts that fail by one fault count once."""
        was = self.state
        self._apply(BreakerEvent.FAILED)
        if was is BreakerState.HALF_OPEN:
            longest_s = self._config.breaker_max_cooldown_s
            self._cooldown_s = min(2 * self._cooldown_s, longest_s)
            self._opened(now)
        elif was is BreakerState.CLOSED:
            self._outcomes.append((now, False))
            if self._is_failing(now):
                self._apply(BreakerEvent.TRIPPED)
                self._opened(now)

    def advance(self, now: float) -> None:
        """Let time pass; to be called at every sweep."""
        if self.state is BreakerState.OPEN and now - self.opened_at >= self._cooldown_s:
            self._apply(BreakerEvent.COOLED)

    def reset(self) -> None:
        """Begin anew, for a new life."""
        self._apply(BreakerEvent.RESET)
        self._forget()

    def begin(self, key: AttemptKey) -> None:
        """Note an attempt that goes to the worker."""
        if self.state is BreakerState.HALF_OPEN and self.probe is None:
            self.probe = key

    def leave(self, key: AttemptKey) -> None:
        """Note that an attempt is over there; without an outcome another one may try."""
        if self.probe == key:
            self.probe = None

    def _is_failing(self, now: float) -> bool:
        oldest = now - self._config.breaker_memory_s
        recent = [is_good for at, is_good in self._outcomes if at >= oldest]
        num_failures = recent.count(False)
        return num_failures >= self._config.breaker_min_failures and 2 * num_failures >= len(recent)

    def _opened(self, now: float) -> None:
        self.opened_at = now
        self.probe = None
        self._outcomes.clear()

    def _forget(self) -> None:
        self._outcomes.clear()
        self._cooldown_s = self._config.breaker_cooldown_s
        self.probe = None

    def _apply(self, event: BreakerEvent) -> None:
        self.state = next_state(self.state, event)


def ejected(pool: Sequence[T], breaker_of: Callable[[T], Breaker]) -> list[T]:
    """Return who of a pool is left out: those whose breakers do not admit, but at most half of the
    pool. Who failed first stays out; the last ones to fail are spared.

    Args:
      pool: the workers of one role that could be used.
      breaker_of: the breaker of each.
    """
    shut = [one for one in pool if not breaker_of(one).is_admitting]
    shut.sort(key=lambda one: breaker_of(one).opened_at)
    return shut[: len(pool) // 2]
