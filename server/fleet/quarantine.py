"""Prompts that killed workers, refused for a while.

Knows digests and time, not the prompts themselves: what is remembered of a client's text cannot be
read back. Bounded; at the bound the oldest is forgotten.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from transport.tokens import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.config_recovery import RecoveryConfig


def prompt_digest(prompt_ids: Sequence[int]) -> bytes:
    """Return what a prompt is remembered by."""
    return hashlib.blake2b(pack_tokens(prompt_ids), digest_size=16).digest()


class Quarantine:
    """The table.

    Args:
      config: how long, and how many at most.
    """

    def __init__(self, config: RecoveryConfig) -> None:
        self._keep_s = config.quarantine_s
        self._max_prompts = config.max_quarantined
        # In the order in which they are forgotten.
        self._until: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, prompt_ids: Sequence[int], now: float) -> None:
        """Refuse a prompt from now on."""
        digest = prompt_digest(prompt_ids)
        self._until.pop(digest, None)
        if len(self._until) >= self._max_prompts:
            del self._until[next(iter(self._until))]
        self._until[digest] = now + self._keep_s

    def remaining_s(self, prompt_ids: Sequence[int], now: float) -> float | None:
        """Return how long a prompt is refused still, or None if it is not."""
        self._forget(now)
        if not self._until:  # nearly always: digests of long prompts cost time
            return None
        until = self._until.get(prompt_digest(prompt_ids))
        return None if until is None else until - now

    def _forget(self, now: float) -> None:
        while self._until:
            digest = next(iter(self._until))
            if self._until[digest] > now:
                return
            del self._until[digest]
