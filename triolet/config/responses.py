"""Bounds of stored responses and of the response cache, each with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ..units import KIB, MIB, SECONDS
from .limits import CountOrZero, NotNegative  # noqa: TC001 (get_type_hints reads the annotations)


@dataclass(frozen=True, slots=True)
class StoredResponsesConfig:
    """Stored responses, which clients continue or fetch by id."""

    ttl_s: NotNegative = 0 * SECONDS
    """How long a response is kept after its last use; 0 keeps none: conversations stay in memory
    after their clients have gone only if the operator wants it."""
    max_bytes: int = 64 * MIB
    """All responses of one server, each with its input and 512 bytes of bookkeeping, which bounds
    their number too. Shares of tenants work as in prefix caches: the tenant that holds most
    relative to its share loses its least recently used response. Enough for 40,000 short questions
    with answers; a client that sends its whole conversation each time stores it each time."""

    @property
    def most_answer_bytes(self) -> int:
        """Bytes of the largest response that is kept: what clients may send has its own bounds."""
        return self.max_bytes


OF_CONNECTION: Final = StoredResponsesConfig(ttl_s=math.inf, max_bytes=2 * MIB)
"""Bounds for responses that one WebSocket keeps while it is open: twice the largest message."""


@dataclass(frozen=True, slots=True)
class ResponseCacheConfig:
    """Bounds of the response cache."""

    max_bytes: CountOrZero = 0
    """Most bytes of cached answers in a server; tenants share it as they share prefix caches. 0,
    the default, turns the cache off, so that answers stay in memory after their clients have gone
    only if the operator wants this."""
    ttl_s: NotNegative = 300 * SECONDS
    """Lifetime of an answer. Answers never become wrong; this bounds how long a client's text stays
    in memory."""
    max_answer_bytes: int = 256 * KIB
    """Larger answers are not cached: about 7,000 tokens that arrive one by one, or 400 with 20
    alternatives each. Neither are answers that take more than an eighth of the cache."""

    @property
    def most_answer_bytes(self) -> int:
        """Size of the largest answer that is cached."""
        return min(self.max_answer_bytes, self.max_bytes // 8)
