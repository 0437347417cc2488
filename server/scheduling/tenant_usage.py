"""Tracks what each tenant uses on workers, and decides whether it may use more."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from triolet.service_class import Scheduling

MAX_REMEMBERED: Final = 1024
"""Number of tenants without requests to remember the usual completion length of."""
MEMORY_TURNS: Final = 64
"""Dispatches for which a tenant without requests still counts as likely to return."""


@dataclass(slots=True, eq=False)
class TenantUsage:
    """What one tenant uses.

    Attributes:
      completion_tokens: expected completion length of the next request.
      num_requests: waiting and running requests, in all classes.
      num_running: requests on workers.
      kv_tokens: KV that the running requests are expected to hold in the end.
      weight: weight of the latest request.
    """

    completion_tokens: float
    num_requests: int = 0
    num_running: int = 0
    kv_tokens: int = 0
    weight: float = 0.0


class TenantUsages:
    """What all tenants use.

    Args:
      completion_tokens: expected completion length for an unknown tenant.
      spare_share: share of all rows left free for other tenants.
    """

    def __init__(self, completion_tokens: float, spare_share: float) -> None:
        self._all_kv_tokens = 0  # of all decode workers; 0 while that is unknown
        self._all_rows = 0
        self._spare_share = spare_share
        self._weights = 0.0
        self._num_running = 0
        self._turns = 0
        self._latest: str | None = None
        self._others_turn = -MEMORY_TURNS
        self._completion_tokens = completion_tokens
        self._active: dict[str, TenantUsage] = {}
        self._remembered: OrderedDict[str, TenantUsage] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of tenants with waiting or running requests."""
        return len(self._active)

    def of(self, tenant: str, weight: float) -> TenantUsage:
        """Return the usage of a tenant that has, or is about to have, a request."""
        usage = self._active.get(tenant)
        if usage is None:
            usage = self._remembered.pop(tenant, None) or TenantUsage(self._completion_tokens)
            self._active[tenant] = usage
        self._weights += weight - usage.weight
        usage.weight = weight
        return usage

    def part(self, tenant: str, weight: float) -> float:
        """Return a tenant's share by weight among the tenants with requests."""
        own = self._active.get(tenant)
        others = self._weights - (0.0 if own is None else own.weight)
        return weight / (weight + max(others, 0.0))

    def completion_tokens(self, tenant: str) -> float:
        """Return the expected length of a tenant's next completion."""
        usage = self._active.get(tenant) or self._remembered.get(tenant)
        return self._completion_tokens if usage is None else usage.completion_tokens

    def take(self, tenant: str, usage: TenantUsage, kv_tokens: int) -> None:
        """Count a request that starts to run."""
        usage.num_running += 1
        usage.kv_tokens += kv_tokens
        self._num_running += 1
        if tenant != self._latest:
            if self._latest is not None:
                self._others_turn = self._turns
            self._latest = tenant
        self._turns += 1

    def give(self, usage: TenantUsage, kv_tokens: int) -> None:
        """Stop counting a running request."""
        usage.num_running -= 1
        usage.kv_tokens -= kv_tokens
        self._num_running -= 1

    def left(self, tenant: str) -> None:
        """Move a tenant without requests to the remembered ones."""
        usage = self._active[tenant]
        if not usage.num_requests:
            del self._active[tenant]
            self._weights = self._weights - usage.weight if self._active else 0.0
            usage.weight = 0.0
            self._remembered[tenant] = usage
            while len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)

    def note_pools(self, kv_tokens: int, rows: int) -> bool:
        """Record how many tokens and sequences all decode workers can hold; return whether that
        changed."""
        was = self._all_kv_tokens, self._all_rows
        self._all_kv_tokens, self._all_rows = kv_tokens, rows
        return was != (kv_tokens, rows)

    def allows(self, usage: TenantUsage, scheduling: Scheduling, cost: int) -> bool:
        """Return whether a tenant may run one more request. The first one is always allowed: a
        tenant whose share is smaller than a request could otherwise never run it."""
        if not usage.num_running:
            return True
        if scheduling.max_running is not None and usage.num_running >= scheduling.max_running:
            return False
        if scheduling.kv_share >= 1 or not self._all_kv_tokens:
            return True
        return usage.kv_tokens + cost <= scheduling.kv_share * self._all_kv_tokens

    def leaves_rows(self, tenant: str, usage: TenantUsage) -> bool:
        """Return whether one more request of a tenant that already has its share of rows would take
        a row that is left free for others."""
        num_spare = int(self._all_rows * self._spare_share)
        if not num_spare or self._num_running < self._all_rows - num_spare:
            return False
        is_alone = len(self._active) < 2 and (
            tenant == self._latest and self._turns - self._others_turn >= MEMORY_TURNS
        )
        # The weight of a tenant without requests is unknown; assume this one's.
        others = self._weights - usage.weight if len(self._active) > 1 else usage.weight
        share = usage.weight / (usage.weight + others)
        return not is_alone and usage.num_running >= share * self._all_rows
