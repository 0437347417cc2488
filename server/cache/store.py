"""Answers by name, for a short time and within so many bytes.

When room runs out, fair_lru.py decides which answer goes. What is too old is gone at the next look.
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
"""What an answer costs beside its own bytes."""


class KeptAnswer(NamedTuple):
    """One answer.

    Attributes:
      answer: its bytes.
      tenant: its owner.
      since: when it was kept.
    """

    answer: bytes
    tenant: bytes
    since: float

    @property
    def num_bytes(self) -> int:
        """What it costs."""
        return len(self.answer) + ENTRY_BYTES


class ResponseStore:
    """All answers of one server.

    Args:
      config: bounds.

    Attributes:
      used_bytes: of all that is kept.
      gone: answers that are not kept any more, by why.
      outcomes: requests by what came of them.
    """

    def __init__(self, config: ResponseCacheConfig | StoredResponsesConfig) -> None:
        self.used_bytes = 0
        self.gone: Counter[str] = Counter({"expired": 0, "evicted": 0})
        self.outcomes: Counter[CacheOutcome] = Counter(dict.fromkeys(CacheOutcome, 0))
        self._config = config
        self._kept: dict[bytes, KeptAnswer] = {}  # the oldest first
        self._order: FairLru[bytes] = FairLru()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, name: bytes, now: float) -> KeptAnswer | None:
        """Return an answer, None if it is not here."""
        self.expire(now)
        kept = self._kept.get(name)
        if kept is not None:
            self._order.touch(name, kept.tenant)
        return kept

    def keep(self, name: bytes, answer: bytes, keeper: Keeper, now: float) -> bool:
        """Keep an answer, instead of an earlier one of this name.

        Returns:
          Whether it is kept: not if it is too large.
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
        """Forget what is too old."""
        while self._kept:
            name, kept = next(iter(self._kept.items()))
            if now - kept.since < self._config.ttl_s:
                break
            self.drop(name)
            self.gone["expired"] += 1

    def held_by(self, tenant: bytes) -> int:
        """Return the bytes of a tenant's answers."""
        return self._order.held_by(tenant)

    def check_invariants(self) -> None:
        """Assert that bytes and names agree."""
        self._order.check_invariants()
        assert set(self._order) == self._kept.keys(), "an answer has no place in the order"
        assert self.used_bytes == sum(kept.num_bytes for kept in self._kept.values()), "lost bytes"
        assert self.used_bytes <= self._config.max_bytes, "more than may be kept"

    def drop(self, name: bytes) -> None:
        """Forget an answer that is here."""
        kept = self._kept.pop(name)
        self._order.remove((name,), kept.tenant)
        self.used_bytes -= kept.num_bytes
