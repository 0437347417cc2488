"""A rate with a burst of one second, as a token bucket. Knows no clock: `now` is handed in."""

from __future__ import annotations


class TokenBucket:
    """Allows `per_s` events a second, and as many at once."""

    def __init__(self, per_s: float, now: float) -> None:
        self._per_s = per_s
        self._tokens = per_s
        self._filled_at = now

    def take(self, now: float) -> bool:
        """Count one event; return whether it is within the rate."""
        self._tokens = min(self._per_s, self._tokens + (now - self._filled_at) * self._per_s)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
