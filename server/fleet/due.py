"""When time alone may bring something about for a sequence: the other half of `Attempts.sweep`.

Pure. Knows what a sweep judges by time; changes nothing. Sweeps rest until something that is known
may be due, and no longer than what begins meanwhile takes to become due: a stall, a silence, credit
to be repeated. A request that brings its own deadline is noted when it comes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .phases import Phase

if TYPE_CHECKING:
    from triolet.config import ServerConfig

    from .sequence import Attempt, Sequence


class SweepTimes:
    """When to sweep again.

    Args:
      config: intervals and timeouts.
      now: the time of the start.
    """

    def __init__(self, config: ServerConfig, now: float) -> None:
        link = config.link
        self._interval_s = link.sweep_interval_s
        # Half a heartbeat: whoever sees that no clock was read for a whole one stood still.
        self._lull_s = min(link.heartbeat_interval_s / 2, config.stall_timeout_s)
        self._swept_at = self._due_at = now
        self._round_due_at = math.inf

    def note(self, due_at: float) -> None:
        """Note when something may be due."""
        self._due_at = min(self._due_at, due_at)
        self._round_due_at = min(self._round_due_at, due_at)

    def swept(self, now: float, *, is_round_over: bool) -> None:
        """Note a sweep; unless all have had their turn the next one follows soon."""
        self._swept_at = self._due_at = now
        if is_round_over:
            self._due_at = min(self._round_due_at, now + self._lull_s)
            self._round_due_at = math.inf

    def next_at(self, *, is_restless: bool) -> float:
        """Return when to sweep again: soon, or not before something may be due.

        Args:
          is_restless: what a sweep looks for may come at any time.
        """
        soon = self._swept_at + self._interval_s
        return soon if is_restless else max(soon, self._due_at)


def due_at(sequence: Sequence, config: ServerConfig) -> float:
    """Return the first moment at which a sweep may have something to do for a sequence."""
    due = sequence.deadline
    waiting_since = sequence.relay.mailbox.waiting_since
    if waiting_since is not None:
        due = min(due, waiting_since + config.stall_timeout_s)
    attempt, forecast = sequence.attempt, sequence.forecast
    if attempt is None:
        if not sequence.num_attempts and forecast is not None:
            due = min(due, forecast.first_token_by or due)
        return due
    if sequence.phase is Phase.RESERVING:
        due = min(due, attempt.grant_by)
    if attempt.gap_since is not None:
        due = min(due, attempt.gap_since + config.link.peer_timeout_s)
    if may_decode(sequence, attempt):
        due = min(due, quiet_since(sequence, attempt) + config.link.heartbeat_interval_s)
    return due


def quiet_since(sequence: Sequence, attempt: Attempt) -> float:
    """Return since when nothing has come of what decode may send, nor its credit been repeated."""
    moments = (attempt.quiet_since, attempt.granted_at or 0.0, sequence.times.last_token_at or 0.0)
    return max(moments)


def may_decode(sequence: Sequence, attempt: Attempt) -> bool:
    """Return whether tokens may be under way of which only decode can tell."""
    is_computing = sequence.phase is Phase.PREFILLING and attempt.pair.is_local
    return is_computing or sequence.phase is Phase.DECODING
