"""A token bucket: so much per minute, refilled all the time, with a burst of one minute.

Pure: `now` is handed in. Knows no tenant, and nothing of who keeps it; scripts.py says the same
once more in Redis' own language.

A charge beyond what is there drives it below zero: a request that used more than was reserved is
not cut, its tenant waits longer. What is given back makes the level what it would be without the
charge, at most full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MINUTE_S: Final = 60.0
GRAIN: Final = 1e-6
"""Of a request, or of a token: what sums of floats may be off by. Who has waited as long as it was
told shall not lack a thousand-millionth."""


@dataclass(slots=True)
class Bucket:
    """What is left of one limit.

    Attributes:
      level: that was there at `at`; below zero is a debt.
      at: when.
    """

    level: float
    at: float

    def level_at(self, limit: float, now: float) -> float:
        """Return what is there now, at most a minute's worth."""
        elapsed_s = max(0.0, now - self.at)
        return min(limit, self.level + elapsed_s * limit / MINUTE_S)

    def charge(self, amount: float, limit: float, now: float) -> None:
        """Take something out, whether it is there or not."""
        self.level = self.level_at(limit, now) - amount
        self.at = max(now, self.at)

    def refund(self, amount: float) -> None:
        """Give something back. What would run over runs over when the level is next looked at."""
        self.level += amount

    def wait_s(self, amount: float, limit: float, now: float) -> float:
        """Return after how long so much will be there, if nobody takes anything; 0 if it is."""
        return max(0.0, (amount - GRAIN - self.level_at(limit, now)) * MINUTE_S / limit)
