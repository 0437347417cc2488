"""Answers that are given again to whoever asks the same: how many bytes of them, and how long."""

from __future__ import annotations

from dataclasses import dataclass

from .units import KIB, SECONDS


@dataclass(frozen=True, slots=True)
class ResponseCacheConfig:
    """Bounds of the response cache."""

    max_bytes: int = 0
    """Of all answers of one server, tenants' shares of it as in their prefix caches; 0 keeps none,
    because an operator has to want that answers stay in memory after their clients have gone."""
    ttl_s: float = 300 * SECONDS
    """An answer is the same for ever; this is how long somebody's words may be found in memory."""
    max_answer_bytes: int = 256 * KIB
    """A longer one is not kept: some 7,000 tokens that come one by one, or 400 with 20
    alternatives each. Nor is one of more than an eighth of all."""

    @property
    def most_answer_bytes(self) -> int:
        """Bytes of the largest answer that is kept."""
        return min(self.max_answer_bytes, self.max_bytes // 8)
