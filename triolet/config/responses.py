"""Bounds of stored responses, with reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ..units import MIB, SECONDS
from .limits import NotNegative  # noqa: TC001 (get_type_hints reads the annotations)


@dataclass(frozen=True, slots=True)
class StoredResponsesConfig:
    """Responses that clients go on from by an id, or ask for again."""

    ttl_s: NotNegative = 0 * SECONDS
    """For which a response is kept after its last use; 0 keeps none, because an operator has to
    want that conversations stay in memory after their clients have gone."""
    max_bytes: int = 64 * MIB
    """Of all responses of one server, each with its input and 512 bytes of bookkeeping, so that
    their number is bounded too. Tenants' shares of it are as in their prefix caches: the tenant
    that holds most for its share loses its least recently used one. Some 40,000 short questions
    with answers; a client that sends its whole conversation each time has all of it stored each
    time."""

    @property
    def most_answer_bytes(self) -> int:
        """Bytes of the largest response that is kept: what may be sent has its own bounds."""
        return self.max_bytes


OF_CONNECTION: Final = StoredResponsesConfig(ttl_s=math.inf, max_bytes=2 * MIB)
"""Bounds of what one WebSocket remembers while it is open: twice the largest message."""
