"""A store of answers by key, limited in bytes and age.

When it is full, `fair_lru.py` chooses what to evict. Expired answers are removed on the next
access.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.fair_lru import FairLru

from ..contract.generation import CacheOutcome

if TYPE_CHECKING:
    from triolet.config import ResponseCacheConfig, StoredResponsesConfig
    from triolet.fair_lru import Keeper

ENTRY_BYTES: Final = 512
"""Overhead per stored answer."""


class KeptAnswer(NamedTuple):
    """A stored answer.

    Attributes:
      answer: its bytes.
      tenant: its owner.
      since: when it was stored.
    """

    answer: bytes
    tenant: bytes
    since: float

    @property
    def num_bytes(self) -> int:
        """Bytes charged for it, with overhead."""
        return len(self.answer) + ENTRY_BYTES


class ResponseStore:
    """All stored answers of one server.

    Args:
      config: limits.

    Attributes:
      used_bytes: bytes charged for all stored answers.
      gone: number of removed answers, by reason.
      outcomes: number of requests, by outcome.
    """

    def __init__(self, config: ResponseCacheConfig | StoredResponsesConfig) -> None:
        self.used_bytes = 0
        self.gone: Counter[str] = Counter({"expired": 0, "evicted": 0})
        self.outcomes: Counter[CacheOutcome] = Counter(dict.fromkeys(CacheOutcome, 0))
        self._config = config
        self._kept: dict[bytes, KeptAnswer] = {}  # oldest first
        self._order: FairLru[bytes] = FairLru()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, name: bytes, now: float) -> KeptAnswer | None:
        """Return an answer, or None if it is not stored."""
        self.expire(now)
        kept = self._kept.get(name)
        if kept is not None:
            self._order.touch(name, kept.tenant)
        return kept

    def keep(self, name: bytes, answer: bytes, keeper: Keeper, now: float) -> bool:
        """Store an answer, replacing an earlier one with this key.

        Returns:
          Whether it was stored; False if it is too large.
        """
        self.expire(now)
        kept = KeptAnswer(answer, keeper.tenant, now)
        if kept.num_bytes > self._config.most_answer_bytes:
            return False
        if name in self._kept:
            self.drop(name)
        self._kept[name] = kept
        self._order.add((name,), keeper, kept.num_bytes)
        self.used_bytes += kept.num_bytes
        while self.used_bytes > self._config.max_bytes:
            self.used_bytes -= self._kept.pop(self._order.pop()).num_bytes
            self.gone["evicted"] += 1
        return name in self._kept

    def expire(self, now: float) -> None:
        """Remove expired answers."""
        while self._kept:
            name, kept = next(iter(self._kept.items()))
            if now - kept.since < self._config.ttl_s:
                break
            self.drop(name)
            self.gone["expired"] += 1

    def held_by(self, tenant: bytes) -> int:
        """Return the bytes that a tenant's answers use."""
        return self._order.held_by(tenant)

    def check_invariants(self) -> None:
        """Assert that sizes and keys are consistent."""
        self._order.check_invariants()
        assert set(self._order) == self._kept.keys(), "an answer is missing from the order"
        assert self.used_bytes == sum(kept.num_bytes for kept in self._kept.values()), (
            "used_bytes is wrong"
        )
        assert self.used_bytes <= self._config.max_bytes, "more bytes than allowed"

    def drop(self, name: bytes) -> None:
        """Remove an answer that is stored."""
        kept = self._kept.pop(name)
        self._order.remove((name,), kept.tenant)
        self.used_bytes -= kept.num_bytes
