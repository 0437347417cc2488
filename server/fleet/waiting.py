"""How long it takes until those who wait for workers have their turns.

Knows sizes; refuses to know order (fair_queue.py) and workers.
"""

from __future__ import annotations

import math
from typing import Final

from triolet.units import SECONDS

MEMORY_S: Final = 30 * SECONDS
"""How far back the pace is measured: several generations long, so that a batch that ends all at
once does not look like speed, nor the time before it like a standstill."""
MIN_MEASURED_S: Final = 2 * SECONDS
"""Below this much waiting no pace is known, and nobody is refused for it."""


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
