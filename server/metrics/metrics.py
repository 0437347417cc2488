"""What the server counts, and how Prometheus reads it.

Every label has a bounded set of values: nothing that a client sends becomes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
from prometheus_client import (
    CollectorRegistry,
    disable_created_metrics,
)
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from .collectors import alias_families, fleet_families
from .counters import (
    HttpMetrics,
    QuotaMetrics,
    TenantMetrics,
)
from .exposition import Exposition, Reading
from .fleet import FleetMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prometheus_client.metrics_core import Metric

    from ..scheduling.status import FleetStatus

log = structlog.get_logger(__name__)


class Metrics:
    """The counters of this process.

    Args:
      model_name: label of the alias names.
      compat: `vllm` for alias names, `none` for own names only.

    Attributes:
      fleet: the scheduler's observer.
      scrape: returns what `exposition` does; others have their turn while it is written.
    """

    def __init__(self, model_name: str, compat: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._model_name = model_name
        self._compat = compat
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.http = HttpMetrics(self._registry)
        self.tenants = TenantMetrics(self._registry)
        self.quotas = QuotaMetrics(self._registry)
        self.fleet = FleetMetrics(self._registry, self.tenants)
        self._counters, self._histograms = self.fleet.counters, self.fleet.histograms
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._exposition = Exposition(self._registry.collect)
        self.scrape = self._exposition.take

    def watch(
        self,
        status: Callable[[], FleetStatus],
        connections: Callable[[], int],
        writes: Callable[[], Mapping[str, int]] = dict,
        turned_away: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Read these whenever the metrics are."""
        self._registry.register(
            Reading(lambda: fleet_families(status(), connections(), writes(), turned_away()))
        )
        if self._compat == "vllm":
            self._registry.register(
                Reading(lambda: alias_families(self._own_family, status(), self._model_name))
            )

    def exposition(self) -> bytes:
        """Return everything in Prometheus's text form."""
        return self._exposition.whole()

    def figures(self) -> dict[str, dict[str, float]]:
        """Return counters by their labels, and histograms' running totals by their upper bounds."""
        return {
            name: {
                sample.labels.get("le") or ",".join(sample.labels.values()): sample.value
                for sample in self._own_family(name).samples
                if not sample.name.endswith("_sum") and not sample.name.endswith("_count")
            }
            for name in (*self._counters, *self._histograms)
        }

    def grammar_checked(self, verdict: str) -> None:
        """A grammar was checked, or not for want of time."""
        self._counters["grammars_checked"].labels(verdict).inc()

    def _own_family(self, name: str) -> Metric:
        """Return a counter or histogram by its own name, without the prefix."""
        metric = self._counters.get(name) or self._histograms[name]
        [family] = metric.collect()
        return family
