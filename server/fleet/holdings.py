"""What each tenant has on workers, and whether it may have more.

Pure. Knows counts and the limits of a claim; knows neither order nor workers.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .flow import Flow

MAX_REMEMBERED: Final = 1024
"""Tenants of which nothing is here, whose usual completions are remembered all the same."""


class Holding:
    """One tenant's.

    Attributes:
      num_waiting: its requests that wait, of all classes.
      num_running: those on workers.
      kv_tokens: KV that these hold or are expected to hold in the end.
      completion_tokens: expected of its next request.
      skipped: its flows that wait until something of this is given back.
    """

    __slots__ = ("completion_tokens", "kv_tokens", "num_running", "num_waiting", "skipped")

    def __init__(self, completion_tokens: float) -> None:
        self.num_waiting = 0
        self.num_running = 0
        self.kv_tokens = 0
        self.completion_tokens = completion_tokens
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

    Attributes:
      all_kv_tokens: that all decode workers can hold; 0 if nobody knows.
    """

    def __init__(self, completion_tokens: float) -> None:
        self.all_kv_tokens = 0
        self._completion_tokens = completion_tokens
        self._active: dict[str, Holding] = {}
        self._remembered: OrderedDict[str, Holding] = OrderedDict()

    def __len__(self) -> int:
        """Tenants of which something waits or runs."""
        return len(self._active)

    def of(self, tenant: str) -> Holding:
        """Return a tenant's, which has or is about to have something here."""
        holding = self._active.get(tenant)
        if holding is None:
            holding = self._remembered.pop(tenant, None) or Holding(self._completion_tokens)
            self._active[tenant] = holding
        return holding

    def left(self, tenant: str) -> None:
        """Only remember a tenant from now on, if nothing of it is here any more."""
        holding = self._active[tenant]
        if not holding.num_waiting and not holding.num_running:
            del self._active[tenant]
            self._remembered[tenant] = holding
            while len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)

    def note_kv_tokens(self, kv_tokens: int) -> None:
        """Take in how many tokens all decode workers can hold."""
        if kv_tokens != self.all_kv_tokens:
            self.all_kv_tokens = kv_tokens
            for holding in self._active.values():
                holding.resume()

    def allows(self, flow: Flow[Any]) -> bool:
        """Return whether the first of a flow may run. One of a tenant always may: a share that is
        less than a request would keep it for ever."""
        holding, head = flow.holding, flow.head
        if not holding.num_running:
            return True
        claim = head.place.claim
        if claim.max_running is not None and holding.num_running >= claim.max_running:
            return False
        if claim.kv_share >= 1 or not self.all_kv_tokens:
            return True
        return holding.kv_tokens + head.cost <= claim.kv_share * self.all_kv_tokens
