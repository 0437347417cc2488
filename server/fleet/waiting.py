"""The line of sequences that wait for workers, and how long it will take.

Knows order and sizes; refuses to know workers. Lower priority numbers go first, among these who
came first: a sequence that has to start again keeps its place.
"""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.units import SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triolet.service_class import Claim

    from .sequence import Sequence

MEMORY_S: Final = 30 * SECONDS
"""How far back the pace is measured: several generations long, so that a batch that ends all at
once does not look like speed, nor the time before it like a standstill."""
MIN_MEASURED_S: Final = 2 * SECONDS
"""Below this much waiting no pace is known, and nobody is refused for it."""


class _Place(NamedTuple):
    priority: int
    order: int
    sequence: Sequence


class WaitingLine:
    """Priority, then first come first served."""

    def __init__(self) -> None:
        self._places: list[_Place] = []

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Sequence]:
        return (place.sequence for place in self._places)

    def first(self) -> Sequence:
        """Return whose turn it is. The line must not be empty."""
        return self._places[0].sequence

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into its place."""
        bisect.insort(self._places, _place(sequence), key=lambda place: place[:2])

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out that is in the line."""
        at = bisect.bisect_left(self._places, _place(sequence)[:2], key=lambda place: place[:2])
        assert self._places[at].sequence is sequence, "only who waits can leave the line"
        del self._places[at]

    def pause(self, classes: object) -> None:
        """x"""

    def tokens_ahead(self, claim: Claim, own: int, due: float) -> int:
        """Return the prompt tokens before a newcomer."""
        priority = claim.priority(own)
        end = bisect.bisect_right(self._places, priority, key=lambda place: place.priority)
        return sum(len(place.sequence.request.prompt_ids) for place in self._places[:end])


class Pace:
    """Prompt tokens that leave the line per second while somebody waits.

    Measured where it matters: whatever holds the line up (prefill, blocks, rows), this is the rate
    at which it moves.
    """

    def __init__(self, now: float) -> None:
        self._tokens = 0.0
        self._waited_s = 0.0
        self._measured_at = now

    def advance(self, now: float, *, is_waiting: bool) -> None:
        """Let time pass. `is_waiting`: somebody was in the line since the last call."""
        elapsed_s = now - self._measured_at
        self._measured_at = now
        kept = math.exp(-elapsed_s / MEMORY_S)
        self._tokens *= kept
        self._waited_s = self._waited_s * kept + (elapsed_s if is_waiting else 0.0)

    def left(self, num_tokens: int) -> None:
        """Count a sequence that waited and was dispatched."""
        self._tokens += num_tokens

    def predict_s(self, tokens_ahead: int, running_tokens: int) -> float | None:
        """Return how long a newcomer waits, or None if there is nothing to judge by.

        Args:
          tokens_ahead: prompt tokens before it.
          running_tokens: prompt tokens of what runs. They count as done now: whatever runs will
            end and let as much in, so a line that has not moved yet still has a pace.
        """
        if self._waited_s < MIN_MEASURED_S or tokens_ahead == 0:
            return None
        return tokens_ahead * self._waited_s / max(self._tokens + running_tokens, 1.0)


def _place(sequence: Sequence) -> _Place:
    return _Place(sequence.request.rank, sequence.order, sequence)
