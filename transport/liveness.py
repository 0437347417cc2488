"""Decide whether a peer is alive from its heartbeats, and detect pauses of this process itself.

No I/O; the caller supplies the clock. ZeroMQ's I/O thread answers pings even if the rest of a
process is stuck, so heartbeats carry a progress counter: a peer with pending work and an unchanged
counter counts as dead.

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
"""Late heartbeats before a peer gets no new work."""

WEDGED_STEPS: Final = 10.0
"""A peer is stuck after this many times its announced step length without progress: the machine may
be busy, and steps get longer with their context."""


class PeerState(Enum):
    """State of a peer, as seen from here."""

    CONNECTING = "connecting"  # it has not answered our HELLO yet
    ALIVE = "alive"
    SUSPECT = "suspect"  # late: keep what it has, give it nothing new
    DEAD = "dead"


class PeerEvent(Enum):
    """Events that change the state."""

    GREETED = "greeted"  # HELLO or WELCOME
    HEARD = "heard"  # any other frame
    QUIET = "quiet"  # heartbeats are late
    SILENT = "silent"  # nothing for `peer_timeout_s` (`hello_timeout_s` while connecting)
    WEDGED = "wedged"  # it answers, but makes no progress on its work
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
    # Only a new greeting revives a dead peer: it has lost the work that we gave it.
    _S.DEAD: {_E.GREETED: _S.ALIVE},
}


class PeerMonitor:
    """State machine for the process at the other end of one link.

    Args:
      config: intervals and timeouts.
      now: the time at which connecting began.

    Attributes:
      state: after the last call.
      reason: the event that led to the present state; for logs and metrics.
      epoch: epoch of the process that was greeted last.
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
        """Return whether it is still in the step for which it was given up, even if greeted
        again."""
        return self._has_work and self._wedged_at == (self.epoch, self._progress)

    def greeted(self, epoch: int, now: float, step_s: float = 0.0) -> bool:
        """Process a HELLO or WELCOME.

        Args:
          epoch: epoch of the process that answered.
          now: current time.
          step_s: length of its device steps, as announced.

        Returns:
          Whether an earlier epoch of this peer is over, so that its work is lost.
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
        """Process a heartbeat; servers have no progress to show.

        Returns:
          False if it is from another epoch than the one greeted, or from a dead peer: it is
            ignored, and the peer must be greeted again.
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
        """Process any other frame of the greeted epoch; return whether one is greeted."""
        is_greeted = self.state in (PeerState.ALIVE, PeerState.SUSPECT)
        if is_greeted:
            self._heard_at = now
            self._apply(PeerEvent.HEARD)
        return is_greeted

    def excuse(self, absence_s: float) -> None:
        """Do not count time in which we did not listen: the peer's messages from then are still
        unread."""
        self._heard_at += absence_s
        self._progressed_at += absence_s

    def silence_s(self, now: float) -> float:
        """Return the seconds since it was last heard."""
        return now - self._heard_at

    def lost(self) -> None:
        """Mark the peer as gone, as reported by the link or the peer. Idempotent."""
        if self.state is not PeerState.DEAD:
            self._apply(PeerEvent.LOST)

    def check(self, now: float) -> PeerState:
        """Judge silence and progress, and return the state. Call this at every sweep."""
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
        """Return when `check` may next change the state if the peer stays silent."""
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
        """Return whether it makes no progress; one standstill counts only once."""
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
    """Notices that this process itself stood still: stopped, swapped out or starved of CPU.

    Longer than its leases: its peers have given up on it. A worker then drops everything and takes
    a new epoch before it reads any frame; a server drops every attempt, because its workers have
    released the leases.

    Shorter: nothing is lost, but the time (`absence_s`) must not count as silence of other peers.

    Args:
      config: config of the links.
      now: start time.
      limit_s: longest standstill that loses nothing.

    Attributes:
      absence_s: length of the standstill before the last beat; 0 if there was none.
    """

    def __init__(self, config: LinkConfig, now: float, limit_s: float) -> None:
        self.absence_s = 0.0
        self._limit_s = limit_s
        # A gap up to this is harmless: with a peer's last heartbeat it is still shorter than the
        # silence that makes a peer dead.
        self._tolerated_s = config.heartbeat_interval_s
        self._beat_at = now

    def beat(self, now: float) -> bool:
        """Record that the loop runs. Return whether everything must be dropped first."""
        gap_s = now - self._beat_at
        self._beat_at = now
        self.absence_s = gap_s if gap_s > self._tolerated_s else 0.0
        return gap_s > self._limit_s
