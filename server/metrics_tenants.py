"""What is counted for each tenant, and what became of the file that names them.

Tenants come from an operator's file, so that there are as many labels as it has names; nobody is
counted where there are none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import Counter
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from .generation import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from triolet.service_class import Claim

    from .tenancy import TenancyReport

REJECTED: Final = "rejected"
"""Outcome of a request that was refused at once."""
NO_USAGE: Final = Usage(0, 0)


class TenantMetrics:
    """Told of each sequence once, at its end.

    Args:
      registry: where the counters are shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._requests = Counter(
            "triolet_tenant_requests",
            "Sequences of a tenant by class and by how they ended",
            ("tenant", "class", "outcome"),
            registry=registry,
        )
        self._tokens = Counter(
            "triolet_tenant_tokens",
            "Tokens of a tenant by class and kind; prompt holds cached",
            ("tenant", "class", "kind"),
            registry=registry,
        )

    def watch(self, report: Callable[[], TenancyReport]) -> None:
        """Read this whenever the metrics are."""
        self._registry.register(_FileCollector(report))

    def ended(self, claim: Claim, outcome: str, usage: Usage) -> None:
        """A sequence ended, or was refused."""
        if not claim.tenant:
            return
        service_class = claim.service_class.name.lower()
        self._requests.labels(claim.tenant, service_class, outcome).inc()
        for kind, count in (
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("completion", usage.completion_tokens),
        ):
            if count:
                self._tokens.labels(claim.tenant, service_class, kind).inc(count)


class _FileCollector:
    def __init__(self, report: Callable[[], TenancyReport]) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """Yield what is known of the file of tenants; zeros where there is none."""
        report = self._report()
        yield GaugeMetricFamily("triolet_tenants", "Tenants that there are", report.tenants)
        yield GaugeMetricFamily(
            "triolet_tenants_file_refused",
            "1 while the newest file of tenants is not what counts",
            float(bool(report.problem)),
        )
        changes = CounterMetricFamily(
            "triolet_tenants_files", "Files of tenants by what became of them", labels=["outcome"]
        )
        changes.add_metric(["taken"], report.num_taken)
        changes.add_metric(["refused"], report.num_refused)
        yield changes
