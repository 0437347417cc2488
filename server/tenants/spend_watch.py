"""Says when a tenant's spend crosses a share of its budget, and how the store is.

Knows plans as they were last used; knows no store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import structlog

from .accounts import NANOS

if TYPE_CHECKING:
    from triolet.tenants import Plan

log = structlog.get_logger(__name__)


class QuotaMetricsPort(Protocol):
    """What is counted."""

    def refused(self, limit: str) -> None:
        """A request met a limit."""
        ...

    def reserved(self, elapsed_s: float) -> None:
        """The store was asked, and took so long."""
        ...

    def unreserved(self, tenant: str) -> None:
        """A request was counted for which nothing was reserved."""
        ...

    def cost(self, tenant: str, amount: float) -> None:
        """A tenant was charged so much, in the operator's currency."""
        ...

    def budget_watched(self, tenant: str, share: float) -> None:
        """From now on it is noted when a tenant's spend crosses a share of its budget."""
        ...

    def budget_alert(self, tenant: str, share: float) -> None:
        """A tenant's spend crossed a share of its budget."""
        ...

    def store_failed(self) -> None:
        """The shared store did not do what it was asked."""
        ...


class SpendWatch:
    """Told by the store of whatever is spent. See `SpendObserver`.

    Args:
      metrics: told what there is to count.
    """

    def __init__(self, metrics: QuotaMetricsPort) -> None:
        self._metrics = metrics
        self._plans: dict[str, Plan] = {}

    def note(self, tenant: str, plan: Plan) -> None:
        """Learn what a tenant may spend."""
        if self._plans.get(tenant) == plan:
            return
        self._plans[tenant] = plan
        if plan.budget is not None:
            for share in plan.budget_alerts:
                self._metrics.budget_watched(tenant, share)

    def spent(self, tenant: str, before: int, after: int) -> None:
        """Say so if a share of the budget lies between the two: once, as spend only grows."""
        plan = self._plans.get(tenant)
        if plan is None or plan.budget is None:
            return
        for share in plan.budget_alerts:
            if before < share * plan.budget * NANOS <= after:
                log.warning(
                    "budget_alert",
                    tenant=tenant,
                    share=share,
                    spent=round(after / NANOS, 6),
                    budget=plan.budget,
                )
                self._metrics.budget_alert(tenant, share)

    def store_changed(self, *, is_shared: bool) -> None:
        """Nothing to count: whoever reads the metrics asks the store."""

    def call_failed(self, reason: str) -> None:
        """Count it; the store says in the log what follows."""
        del reason
        self._metrics.store_failed()
