"""What each tenant has on workers, and whether it may have more.

Pure. Knows counts and the limits of a scheduling; knows neither order nor workers.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .tenant_queue import Flow

MAX_REMEMBERED: Final = 1024
"""Tenants of which nothing is here, whose usual completions are remembered all the same."""
MEMORY_TURNS: Final = 64
"""For so many turns a tenant of which nothing is here still counts as one that may come again."""


class Holding:
    """One tenant's.

    Attributes:
      num_waiting: its requests that wait, of all classes.
      num_running: those on workers.
      kv_tokens: KV that these hold or are expected to hold in the end.
      completion_tokens: expected of its next request.
      weight: as its latest request claims.
      skipped: its flows that wait until something of this is given back.
    """

    __slots__ = (
        "completion_tokens",
        "kv_tokens",
        "num_running",
        "num_waiting",
        "skipped",
        "weight",
    )

    def __init__(self, completion_tokens: float) -> None:
        self.num_waiting = 0
        self.num_running = 0
        self.kv_tokens = 0
        self.completion_tokens = completion_tokens
        self.weight = 0.0
        self.skipped: list[Flow[Any]] = []

    def take(self, kv_tokens: int) -> None:
        """Count one that runs from now on."""
        self.num_running += 1
        self.kv_tokens += kv_tokens

    def give(self, kv_tokens: int) -> None:
        """Count one out that ran: another one may."""
        self.num_running -= 1
        self.kv_tokens -= kv_tokens
        self.resume()

    def resume(self) -> None:
        """Take in again what was skipped; whether it may run now is asked when its turn comes."""
        skipped, self.skipped = self.skipped, []
        for flow in skipped:
            flow.line.resume(flow)


class Holdings:
    """All tenants'.

    Args:
      completion_tokens: expected of those whom nobody knows yet.
      spare_share: of all rows, left free for others.

    Attributes:
      all_kv_tokens: that all decode workers can hold; 0 if nobody knows.
      all_rows: sequences that they can run at once; 0 if nobody knows.
    """

    def __init__(self, completion_tokens: float, spare_share: float) -> None:
        self.all_kv_tokens = 0
        self.all_rows = 0
        self._spare_share = spare_share
        self._weights = 0.0
        self._num_running = 0
        self._turns = 0
        self._latest: str | None = None
        self._others_turn = -MEMORY_TURNS
        self._completion_tokens = completion_tokens
        self._active: dict[str, Holding] = {}
        self._remembered: OrderedDict[str, Holding] = OrderedDict()

    def __len__(self) -> int:
        """Tenants of which something waits or runs."""
        return len(self._active)

    def of(self, tenant: str, weight: float) -> Holding:
        """Return a tenant's, which has or is about to have something here."""
        holding = self._active.get(tenant)
        if holding is None:
            holding = self._remembered.pop(tenant, None) or Holding(self._completion_tokens)
            self._active[tenant] = holding
        self._weights += weight - holding.weight
        holding.weight = weight
        return holding

    def part(self, tenant: str, weight: float) -> float:
        """Return a tenant's part by weight among those of which something waits or runs."""
        own = self._active.get(tenant)
        others = self._weights - (0.0 if own is None else own.weight)
        return weight / (weight + max(others, 0.0))

    def completion_tokens(self, tenant: str) -> float:
        """Return what is expected of a tenant's next completion."""
        holding = self._active.get(tenant) or self._remembered.get(tenant)
        return self._completion_tokens if holding is None else holding.completion_tokens

    def take(self, tenant: str, holding: Holding, kv_tokens: int) -> None:
        """Count one that runs from now on."""
        holding.take(kv_tokens)
        self._num_running += 1
        if tenant != self._latest:
            if self._latest is not None:
                self._others_turn = self._turns
            self._latest = tenant
        self._turns += 1

    def give(self, holding: Holding, kv_tokens: int) -> None:
        """Count one out that ran."""
        self._num_running -= 1
        holding.give(kv_tokens)

    def left(self, tenant: str) -> None:
        """Only remember a tenant from now on, if nothing of it is here any more."""
        holding = self._active[tenant]
        if not holding.num_waiting and not holding.num_running:
            del self._active[tenant]
            self._weights = self._weights - holding.weight if self._active else 0.0
            holding.weight = 0.0
            self._remembered[tenant] = holding
            while len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)

    def note_pools(self, kv_tokens: int, rows: int) -> None:
        """Take in how many tokens and sequences all decode workers can hold."""
        if (kv_tokens, rows) != (self.all_kv_tokens, self.all_rows):
            self.all_kv_tokens, self.all_rows = kv_tokens, rows
            for holding in self._active.values():
                holding.resume()

    def allows(self, flow: Flow[Any]) -> bool:
        """Return whether the first of a flow may run. One of a tenant always may: a share that is
        less than a request would keep it for ever."""
        holding, head = flow.holding, flow.head
        if not holding.num_running:
            return True
        scheduling = head.place.scheduling
        if scheduling.max_running is not None and holding.num_running >= scheduling.max_running:
            return False
        if scheduling.kv_share >= 1 or not self.all_kv_tokens:
            return True
        return holding.kv_tokens + head.cost <= scheduling.kv_share * self.all_kv_tokens

    def leaves_rows(self, flow: Flow[Any]) -> bool:
        """Return whether one more of a tenant, which has its share of the rows already, would take
        one that is left free for others."""
        tenant, holding = flow.tenant, flow.holding
        num_spare = int(self.all_rows * self._spare_share)
        if not num_spare or self._num_running < self.all_rows - num_spare:
            return False
        is_alone = len(self._active) < 2 and (
            tenant == self._latest and self._turns - self._others_turn >= MEMORY_TURNS
        )
        # Of who is not here just now the weight is not known: as much as this one's.
        others = self._weights - holding.weight if len(self._active) > 1 else holding.weight
        share = holding.weight / (holding.weight + others)
        return not is_alone and holding.num_running >= share * self.all_rows
