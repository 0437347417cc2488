"""`EventWindows`: counts good and total events over sliding windows, in constant memory."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

SLOTS: Final = 60
"""Slots of each window. The oldest is dropped while the newest fills, so a figure covers between
59/60 and all of its window."""


class EventCounts(NamedTuple):
    """Good and total events."""

    good: int = 0
    total: int = 0

    @property
    def bad(self) -> int:
        """Events that are not good."""
        return self.total - self.good

    @property
    def bad_share(self) -> float | None:
        """Share of bad events; None without events."""
        return self.bad / self.total if self.total else None


class _Ring:
    """The counts at the start of each slot of one window."""

    def __init__(self, slot_s: float) -> None:
        self.slot_s = slot_s
        self.last = 0
        self.good = array("q", bytes(8 * SLOTS))
        self.total = array("q", bytes(8 * SLOTS))

    def advance(self, elapsed_s: float, good: int, total: int) -> float:
        """Start the slots up to now; return when the next one starts."""
        now = int(elapsed_s / self.slot_s)
        for slot in range(max(self.last + 1, now - SLOTS + 1), now + 1):
            self.good[slot % SLOTS] = good
            self.total[slot % SLOTS] = total
        self.last = max(self.last, now)
        return (self.last + 1) * self.slot_s


class EventWindows:
    """Good and total events, overall and over windows.

    Args:
      spans_s: lengths of the windows.
      began_at: a time not after the first event. Windows that have it in common have their slots in
        common, so that their counts can be subtracted.

    Attributes:
      began_at: see Args.
    """

    def __init__(self, spans_s: Iterable[float], began_at: float) -> None:
        self.began_at = began_at
        self._good = self._total = 0
        self._rings = {span_s: _Ring(span_s / SLOTS) for span_s in spans_s}
        self._due_at = -math.inf

    def add(self, now: float, *, is_good: bool) -> None:
        """Count one event."""
        if now >= self._due_at:
            self._advance(now)
        self._total += 1
        self._good += is_good

    def over(self, span_s: float, now: float) -> EventCounts:
        """Return the events of one of the windows."""
        self._advance(now)
        ring = self._rings[span_s]
        oldest = (ring.last + 1) % SLOTS
        return EventCounts(self._good - ring.good[oldest], self._total - ring.total[oldest])

    def _advance(self, now: float) -> None:
        elapsed_s = now - self.began_at
        due_s = [one.advance(elapsed_s, self._good, self._total) for one in self._rings.values()]
        self._due_at = self.began_at + min(due_s)
