"""What the server counts, and how Prometheus reads it.

Every label has a bounded set of values: nothing that a client sends becomes one.
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

import structlog
from prometheus_client import (
    CollectorRegistry,
    disable_created_metrics,
)
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from .collectors import alias_families, by_model, fleet_families, surface_families
from .counters import (
    UNVERSIONED,
    AutoMetrics,
    HttpMetrics,
    QuotaMetrics,
    TenantMetrics,
    VersionMetrics,
)
from .exposition import Exposition, Reading
from .fleet import FleetMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client import Counter
    from prometheus_client.metrics_core import Metric

    from ..scheduling.status import FleetStatus

    Status: TypeAlias = Callable[[], FleetStatus]

log = structlog.get_logger(__name__)

NO_OTHERS: Final[Mapping[str, Status]] = {}


class Metrics:
    """The counters of this process.

    Where there are several models, what is counted for each has its name as the label `model`.

    Args:
      model_name: of the first model; label of the alias names.
      compat: `vllm` for alias names, `none` for own names only.
      others: names of further models.
      digests: of the models' versions, by name; none of a model that is in no store.

    Attributes:
      auto: models that were chosen here.
      versions: tokens and worker-seconds of each model's version.
      fleets: by the model's name, the observer of its scheduler.
      fleet: that of the first model.
      scrape: returns what `exposition` does; others have their turn while it is written.
    """

    def __init__(
        self,
        model_name: str,
        compat: str,
        *others: str,
        digests: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._compat = compat
        self._names = (model_name, *others)
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.http = HttpMetrics(self._registry)
        self.tenants = TenantMetrics(self._registry)
        self.auto = AutoMetrics(self._registry)
        self.quotas = QuotaMetrics(self._registry, self.auto)
        self.versions = VersionMetrics(self._registry)
        registries = {
            name: CollectorRegistry(auto_describe=False) if others else self._registry
            for name in self._names
        }
        self.fleets = {
            name: FleetMetrics(
                registry, self.tenants, self.versions.of(name, digests.get(name, UNVERSIONED))
            )
            for name, registry in registries.items()
        }
        self.fleet = self.fleets[model_name]
        if others:
            self._registry.register(
                Reading(lambda: by_model({n: r.collect() for n, r in registries.items()}))
            )
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._exposition = Exposition(self._registry.collect)
        self.scrape = self._exposition.take

    def watch(
        self,
        status: Status,
        connections: Callable[[], int],
        writes: Callable[[], Mapping[str, int]] = dict,
        turned_away: Callable[[], Mapping[str, int]] = dict,
        others: Mapping[str, Status] = NO_OTHERS,
    ) -> None:
        """Read these whenever the metrics are: the fleet of the first model, the surface, and the
        fleets of the other models by their names."""
        statuses = {self._names[0]: status, **others}
        self._registry.register(
            Reading(lambda: surface_families(connections(), writes(), turned_away()))
        )
        self._registry.register(Reading(lambda: self._of_fleets(statuses)))
        if self._compat == "vllm":
            self._registry.register(Reading(lambda: self._aliases(statuses)))

    def exposition(self) -> bytes:
        """Return everything in Prometheus's text form."""
        return self._exposition.whole()

    def figures(self) -> dict[str, dict[str, float]]:
        """Return counters by their labels, and histograms' running totals by their upper bounds;
        of all models together."""
        found: dict[str, dict[str, float]] = {}
        for fleet in self.fleets.values():
            for name in (*fleet.counters, *fleet.histograms):
                values = found.setdefault(name, {})
                for sample in _family(fleet, name).samples:
                    if not sample.name.endswith(("_sum", "_count")):
                        key = sample.labels.get("le") or ",".join(sample.labels.values())
                        values[key] = values.get(key, 0.0) + sample.value
        return found

    def tokens_of(self, model: str) -> dict[str, float]:
        """Return the prompt and completion tokens of a model, by the names of their counters."""
        counters = self.fleets[model].counters
        return {name: value_of(counters[name]) for name in ("prompt_tokens", "completion_tokens")}

    def worker_seconds_of(self, model: str) -> float | None:
        """Return how long workers of a model have run together; None where nothing counts it."""
        seconds = self.versions.worker_seconds().get(model)
        return sum(seconds.values()) if seconds else None

    def grammar_checked(self, model: str, verdict: str) -> None:
        """A grammar was checked for a model, or not for want of time."""
        self.fleets[model].counters["grammars_checked"].labels(verdict).inc()

    def _of_fleets(self, statuses: Mapping[str, Status]) -> Iterable[Metric]:
        if len(statuses) == 1:
            [status] = statuses.values()
            return fleet_families(status())
        return by_model({name: fleet_families(status()) for name, status in statuses.items()})

    def _aliases(self, statuses: Mapping[str, Status]) -> Iterable[Metric]:
        is_only = len(statuses) == 1
        found = {
            name: alias_families(
                partial(_family, self.fleets[name]), status(), name, is_only=is_only
            )
            for name, status in statuses.items()
        }
        return by_model(found, label=None)


def value_of(counter: Counter) -> float:
    """Return what a counter without labels has counted."""
    [family] = counter.collect()
    return next(one.value for one in family.samples if one.name.endswith("_total"))


def _family(fleet: FleetMetrics, name: str) -> Metric:
    """Return a counter or histogram as it is shown, by its name without the prefix."""
    metric = fleet.counters.get(name) or fleet.histograms[name]
    [family] = metric.collect()
    return family
