"""The counters of what tenants are charged, and of who was refused.

Tenants come from an operator's file, so that there are as many labels as it has names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from .quotas.quotas import Quotas

RESERVE_BUCKETS: Final = (.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1)  # fmt: skip


class QuotaMetrics:
    """Told by whoever keeps the limits (server/quotas/spend_watch.py).

    Args:
      registry: where they are shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refused = Counter(
            "triolet_quota_refusals",
            "Requests that met a limit of their tenant",
            ("limit",),
            registry=registry,
        )
        self._reserved = Histogram(
            "triolet_quota_reserve_seconds",
            "Asking the accounts before a request is queued",
            buckets=RESERVE_BUCKETS,
            registry=registry,
        )
        self._unreserved = Counter(
            "triolet_tenant_unreserved_requests",
            "Requests that count without tokens: refused after work, or for text only",
            ("tenant",),
            registry=registry,
        )
        self._cost = Counter(
            "triolet_tenant_cost",
            "What tenants were charged, in the operator's currency",
            ("tenant",),
            registry=registry,
        )
        self._alerts = Counter(
            "triolet_budget_alerts",
            "Times that a tenant's spend crossed a share of its budget",
            ("tenant", "share"),
            registry=registry,
        )
        self._failures = Counter(
            "triolet_quota_store_failures",
            "Calls of the shared accounts that failed",
            registry=registry,
        )
        self._reservations = Gauge(
            "triolet_quota_reservations", "Requests that are not settled", registry=registry
        )
        self._open_sequences = Gauge(
            "triolet_quota_open_sequences", "Sequences not charged yet", registry=registry
        )
        self._store_up = Gauge(
            "triolet_quota_store_up",
            "1 while limits hold for all servers that share them, 0 while each holds its part",
            registry=registry,
        )
        self._servers = Gauge(
            "triolet_quota_servers",
            "Servers that share the limits, this one included, as far as it knows",
            registry=registry,
        )

    def watch(self, quotas: Quotas) -> None:
        """Read what is in flight, and how the store is, whenever the metrics are."""
        self._reservations.set_function(lambda: quotas.store.num_reserved)
        self._open_sequences.set_function(lambda: quotas.num_open)
        self._store_up.set_function(lambda: quotas.store.is_well)
        self._servers.set_function(lambda: quotas.store.num_servers)

    def refused(self, limit: str) -> None:
        """A request met a limit."""
        self._refused.labels(limit).inc()

    def reserved(self, elapsed_s: float) -> None:
        """The accounts were asked."""
        self._reserved.observe(elapsed_s)

    def unreserved(self, tenant: str) -> None:
        """A request was counted for which nothing was reserved."""
        self._unreserved.labels(tenant).inc()

    def cost(self, tenant: str, amount: float) -> None:
        """A tenant was charged."""
        self._cost.labels(tenant).inc(amount)

    def budget_watched(self, tenant: str, share: float) -> None:
        """Show the counter at 0: Prometheus sees no increase in one that is born at 1."""
        self._alerts.labels(tenant, f"{share:g}")

    def budget_alert(self, tenant: str, share: float) -> None:
        """A tenant's spend crossed a share of its budget."""
        self._alerts.labels(tenant, f"{share:g}").inc()

    def store_failed(self) -> None:
        """A call of the shared accounts failed."""
        self._failures.inc()
