"""Whether a peer lives, and whether we ourselves have been away.

Judges by what the peer says and by its silence; sends nothing, and the clock is the caller's.
ZeroMQ's own pings would be answered by its I/O thread while everything behind it may be stuck, so a
peer has to show progress: with work pending and a counter that stands still it is as good as dead.

    CONNECTING ──greeted──▶ ALIVE ⇄ SUSPECT          (quiet, heard)
         └────────────────────┴────────┴──silent, wedged, lost──▶ DEAD ──greeted──▶ ALIVE
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Final

from triolet.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triolet.config import LinkConfig

QUIET_INTERVALS: Final = 2.0
"""Heartbeats that may be late before a peer gets no new work."""

WEDGED_STEPS: Final = 10.0
"""Steps of the length that a worker announced before standing still means stuck: the machine may be
busy, and a step grows with its context."""


class PeerState(Enum):
    """What we hold of a peer."""

    CONNECTING = "connecting"  # it has not answered our HELLO yet
    ALIVE = "alive"
    SUSPECT = "suspect"  # late: keep what it has, give it nothing new
    DEAD = "dead"


class PeerEvent(Enum):
    """What changes our mind."""

    GREETED = "greeted"  # HELLO or WELCOME
    HEARD = "heard"  # any other frame
    QUIET = "quiet"  # heartbeats are late
    SILENT = "silent"  # nothing for `peer_timeout_s` (`hello_timeout_s` while connecting)
    WEDGED = "wedged"  # it answers, but has work and does none
    LOST = "lost"  # GOODBYE, or the link says that the peer is gone


_S, _E = PeerState, PeerEvent

TRANSITIONS: Final[Mapping[PeerState, Mapping[PeerEvent, PeerState]]] = {
    _S.CONNECTING: {_E.GREETED: _S.ALIVE, _E.SILENT: _S.DEAD, _E.LOST: _S.DEAD},
    _S.ALIVE: {
        _E.GREETED: _S.ALIVE,
        _E.HEARD: _S.ALIVE,
        _E.QUIET: _S.SUSPECT,
        _E.SILENT: _S.DEAD,
        _E.WEDGED: _S.DEAD,
        _E.LOST: _S.DEAD,
    },
    _S.SUSPECT: {
        _E.GREETED: _S.ALIVE,
        _E.HEARD: _S.ALIVE,
        _E.SILENT: _S.DEAD,
        _E.WEDGED: _S.DEAD,
        _E.LOST: _S.DEAD,
    },
    # Only a new greeting revives: whoever was given up has lost what it had from us.
    _S.DEAD: {_E.GREETED: _S.ALIVE},
}


class PeerMonitor:
    """What is known of the process at the other end of one link.

    Args:
      config: intervals and timeouts.
      now: the time at which connecting began.

    Attributes:
      state: as of the last call.
      reason: what brought about the present state; for logs and metrics.
      epoch: the life that was greeted last.
    """

    def __init__(self, config: LinkConfig, now: float) -> None:
        self._config = config
        self.state = PeerState.CONNECTING
        self.reason = PeerEvent.SILENT
        self.epoch: int | None = None
        self._heard_at = now
        self._progress = 0
        self._has_work = False
        self._progressed_at = now
        self._progress_timeout_s = config.progress_timeout_s
        self._wedged_at: tuple[int | None, int] | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether it is still in the step for which it was given up, greeted again or not."""
        return self._has_work and self._wedged_at == (self.epoch, self._progress)

    def greeted(self, epoch: int, now: float, step_s: float = 0.0) -> bool:
        """Take in HELLO or WELCOME.

        Args:
          epoch: of the life that answered.
          now: the time.
          step_s: how long its device steps take, as it says itself.

        Returns:
          Whether an earlier life of this peer is over: all that it had is lost.
        """
        is_another_life = self.epoch is not None and self.epoch != epoch
        self.epoch = epoch
        self._heard_at = now
        self._progress = 0
        self._has_work = False
        self._progressed_at = now
        self._progress_timeout_s = max(self._config.progress_timeout_s, WEDGED_STEPS * step_s)
        self._apply(PeerEvent.GREETED)
        return is_another_life

    def heartbeat(
        self, epoch: int, now: float, *, progress: int = 0, has_work: bool = False
    ) -> bool:
        """Take in a heartbeat; servers have no progress to show.

        Returns:
          False if it is from another life than the one greeted, or from a peer given up: it counts
          for nothing, and the peer has to be greeted again.
        """
        if epoch != self.epoch or self.state not in (PeerState.ALIVE, PeerState.SUSPECT):
            return False
        if progress != self._progress or not has_work or not self._has_work:
            self._progressed_at = now
        self._progress = progress
        self._has_work = has_work
        self.heard(now)
        return True

    def heard(self, now: float) -> bool:
        """Take in any other frame of the greeted life; return whether there is one."""
        is_greeted = self.state in (PeerState.ALIVE, PeerState.SUSPECT)
        if is_greeted:
            self._heard_at = now
            self._apply(PeerEvent.HEARD)
        return is_greeted

    def excuse(self, absence_s: float) -> None:
        """Take back time in which we did not listen: what the peer said meanwhile is still to be
        read, and what it did not say nobody knows."""
        self._heard_at += absence_s
        self._progressed_at += absence_s

    def silence_s(self, now: float) -> float:
        """Return how long ago it was heard last."""
        return now - self._heard_at

    def lost(self) -> None:
        """Take in that the link or the peer itself says that it is gone. Idempotent."""
        if self.state is not PeerState.DEAD:
            self._apply(PeerEvent.LOST)

    def check(self, now: float) -> PeerState:
        """Judge silence and progress; return the state. To be called at every sweep."""
        silence_s = self.silence_s(now)
        if self.state is PeerState.CONNECTING:
            if silence_s > self._config.hello_timeout_s:
                self._apply(PeerEvent.SILENT)
        elif self.state is not PeerState.DEAD:
            if silence_s > self._config.peer_timeout_s:
                self._apply(PeerEvent.SILENT)
            elif self._is_wedged(now):
                self._wedged_at = (self.epoch, self._progress)
                self._apply(PeerEvent.WEDGED)
            elif (
                self.state is PeerState.ALIVE
                and silence_s > QUIET_INTERVALS * self._config.heartbeat_interval_s
            ):
                self._apply(PeerEvent.QUIET)
        return self.state

    @property
    def due_at(self) -> float:
        """When `check` may change its mind, unless the peer is heard before."""
        config = self._config
        match self.state:
            case PeerState.DEAD:
                return math.inf
            case PeerState.CONNECTING:
                return self._heard_at + config.hello_timeout_s
            case PeerState.ALIVE:
                silence_s = QUIET_INTERVALS * config.heartbeat_interval_s
            case PeerState.SUSPECT:
                silence_s = config.peer_timeout_s
        due = self._heard_at + min(silence_s, config.peer_timeout_s)
        is_judged = self._has_work and not self.is_stuck
        return min(due, self._progressed_at + self._progress_timeout_s) if is_judged else due

    def _is_wedged(self, now: float) -> bool:
        """Return whether it stands still; the standstill for which it was given up counts once."""
        is_judged = self._has_work and not self.is_stuck
        return is_judged and now - self._progressed_at > self._progress_timeout_s

    def _apply(self, event: PeerEvent) -> None:
        self.state = next_state(self.state, event)
        self.reason = event


def next_state(state: PeerState, event: PeerEvent) -> PeerState:
    """Return the state that follows.

    Raises:
      LocalProtocolError: the table has no such step.
    """
    following = TRANSITIONS[state].get(event)
    if following is None:
        raise LocalProtocolError(f"a peer that is {state.value} cannot be {event.value}")
    return following


class SelfFence:
    """Notices that this process itself stood still: stopped, swapped out, starved of its CPU.

    Longer than its leases last: whoever gave us work has taken it elsewhere by then. A worker that
    finds itself fenced drops everything and takes a new epoch, before it looks at any frame. A
    server drops every attempt, for its workers have given up its leases.

    Shorter: nothing is lost, but whoever judges the silence of others must not count the time in
    which he did not listen (`absence_s`).

    Args:
      config: of the links.
      now: the time of the start.
      limit_s: the longest standstill that loses nothing.

    Attributes:
      absence_s: how long it stood still before the last beat; 0 if it did not.
    """

    def __init__(self, config: LinkConfig, now: float, limit_s: float) -> None:
        self.absence_s = 0.0
        self._limit_s = limit_s
        # A gap up to here does not mislead: a peer's last heartbeat and it together are shorter
        # than the silence of the dead.
        self._tolerated_s = config.heartbeat_interval_s
        self._beat_at = now

    def beat(self, now: float) -> bool:
        """Note that the loop runs; return whether everything must be dropped first."""
        gap_s = now - self._beat_at
        self._beat_at = now
        self.absence_s = gap_s if gap_s > self._tolerated_s else 0.0
        return gap_s > self._limit_s
