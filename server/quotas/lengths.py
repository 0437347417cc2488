"""How long the completions of a tenant are: the 90th percentile of a stream, in little memory.

Pure. A histogram whose bounds grow by a fifth; once it holds a thousand completions all counts are
halved, so that it follows a tenant who changes its ways.
"""

from __future__ import annotations

import math
from typing import Final

GROWTH: Final = 1.2
"""Between two bounds: how much too long an estimate may be."""
NUM_BINS: Final = 80
"""Up to 1.2 ** 80, two million tokens."""
MAX_COUNT: Final = 1000.0
QUANTILE: Final = 0.9


class CompletionLengths:
    """Lengths of one tenant's completions."""

    def __init__(self) -> None:
        self._counts = [0.0] * NUM_BINS
        self._total = 0.0
        self.num_seen = 0

    def add(self, num_tokens: int) -> None:
        """Take one in."""
        self.num_seen += 1
        position = math.ceil(math.log(max(num_tokens, 1), GROWTH))
        self._counts[min(position, NUM_BINS - 1)] += 1
        self._total += 1
        if self._total >= MAX_COUNT:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2

    def p90(self) -> int:
        """Return a length that nine of ten do not exceed; 1 if there were none."""
        wanted = QUANTILE * self._total
        seen = 0.0
        for position, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return math.ceil(GROWTH**position)
        return 1
