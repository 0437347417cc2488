"""The tenants with the most tokens, which have counters of their own. Bounded, whatever tenants
exist; each call takes constant time, apart from a ranking once in many requests."""

from __future__ import annotations

import heapq
from typing import Final

OTHERS: Final = "other"
"""All tenants without counters of their own."""


class TopTenants:
    """Chooses the tenants that are shown by name.

    Args:
      shown: number of tenants shown by name.
      tracked: number of tenants that are compared; they are ranked after as many requests.

    Attributes:
      names: the tenants that are shown.
    """

    def __init__(self, shown: int, tracked: int) -> None:
        self.names: set[str] = set()
        self._most_shown = shown
        self._most_tracked = max(shown, tracked)
        self._tokens: dict[str, float] = {}
        self._num_requests = 0

    def name_of(self, tenant: str) -> str:
        """Return the tenant's name, or OTHERS."""
        if tenant not in self.names:
            if len(self.names) >= self._most_shown:
                return OTHERS
            self.names.add(tenant)
        return tenant

    def add(self, tenant: str, tokens: int) -> bool:
        """Count a request's tokens; return whether the tenants were ranked again."""
        self._tokens[tenant] = self._tokens.get(tenant, 0) + tokens
        self._num_requests += 1
        if self._num_requests < self._most_tracked:
            return False
        self._num_requests = 0
        ranked = heapq.nlargest(self._most_tracked // 2, self._tokens, key=self._tokens.__getitem__)
        self.names = set(ranked[: self._most_shown])
        # Halved, so that a tenant that was large once makes room.
        self._tokens = {name: self._tokens[name] / 2 for name in ranked}
        return True
