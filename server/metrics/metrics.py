"""All metrics of one server process: one object that owns the counters and writes them for
Prometheus.

Every label has a bounded set of values: no client input becomes a label value.
"""

from __future__ import annotations

from collections import Counter as Tally
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

from triolet.ids import Place, Role

from ..rollouts.collector import RolloutCollector
from ..slo.meter import SloMeter
from .collectors import (
    alias_families,
    by_model,
    fleet_families,
    membership_families,
    scale_families,
    slo_families,
    surface_families,
    usage_families,
)
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
from .rollouts import rollout_families, route_families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client import Counter
    from prometheus_client.metrics_core import Metric

    from triolet.store_health import StoreHealth

    from ..scheduling.status import FleetStatus

    Status: TypeAlias = Callable[[], FleetStatus]

log = structlog.get_logger(__name__)

NO_OTHERS: Final[Mapping[str, Status]] = {}


class Metrics:
    """The metrics of this process.

    While there are several models, metrics of each have its name as the label `model`.

    Args:
      model_name: name of the first model; `model_name` label of the aliases.
      compat: `vllm` to add aliases under vLLM's names, `none` for own names only.
      others: names of further models.
      digests: digest of each model's version, by name; models outside a store have none.
      slos: counts for the service level objectives; None without objectives.
      rollouts: collects evidence about versions for control; None without control.

    Attributes:
      auto: counts requests for `auto`.
      versions: tokens and worker-seconds of each model version.
      usage_dropped: returns the number of records that the usage ledger dropped.
      slos: see Args.
      rollouts: see Args.
      membership: health of the store of members; None without a store.
      desired: returns the desired numbers of workers.
      route_valid_s: returns for how long the route of each rollout is valid, by public name.
      fleets: observer of each model's scheduler, by the model's name.
      fleet: observer of the first model's scheduler.
      scrape: like `exposition`, but lets other tasks run while it writes.
    """

    def __init__(
        self,
        model_name: str,
        compat: str,
        *others: str,
        digests: Mapping[str, str] = MappingProxyType({}),
        slos: SloMeter | None = None,
        rollouts: RolloutCollector | None = None,
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._compat = compat
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.http = HttpMetrics(self._registry)
        self.tenants = TenantMetrics(self._registry)
        self.auto = AutoMetrics(self._registry)
        self.quotas = QuotaMetrics(self._registry, self.auto)
        self.versions = VersionMetrics(self._registry)
        self.usage_dropped: Callable[[], int] = int
        self._registry.register(Reading(lambda: usage_families(self.usage_dropped())))
        self.slos = slos or SloMeter()
        self.rollouts = rollouts or RolloutCollector(slos=self.slos)
        self._registry.register(Reading(lambda: slo_families(self.slos.counters)))
        self.membership: StoreHealth | None = None
        self._registry.register(Reading(lambda: membership_families(self.membership)))
        self.desired: Callable[[], Mapping[Place, int]] = dict
        self._registry.register(Reading(lambda: scale_families(self.places())))
        self._registry.register(Reading(lambda: rollout_families(self.rollouts.views)))
        self.route_valid_s: Callable[[], Mapping[str, float]] = dict
        self._registry.register(Reading(lambda: route_families(self.route_valid_s())))
        self._registries: dict[str, CollectorRegistry] = {}
        self._statuses: dict[str, Status] = {}
        self._past: dict[str, dict[str, float]] = {}
        self.fleets: dict[str, FleetMetrics] = {}
        for name in (model_name, *others):
            self.add(name, digests.get(name, UNVERSIONED))
        self.fleet = self.fleets[model_name]
        self._registry.register(Reading(self._counted))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._exposition = Exposition(self._registry.collect)
        self.scrape = self._exposition.take

    def add(self, model: str, digest: str, status: Status | None = None) -> FleetMetrics:
        """Start metrics for a model; return the observer for its scheduler.

        Args:
          model: the model's name.
          digest: digest of its version, or UNVERSIONED.
          status: returns its fleet's state at scrape time; None if `watch` follows.
        """
        registry = self._registries[model] = CollectorRegistry(auto_describe=False)
        versions = {digest: self.versions.of(model, digest)}
        fleet = self.fleets[model] = FleetMetrics(registry, self.tenants, versions)
        fleet.slow_gap_s = self.slos.slow_gap_s
        if status is not None:
            self._statuses[model] = status
        return fleet

    def set_version(self, model: str, digest: str) -> None:
        """Count another version of a model too; requests of the previous one still run."""
        self.fleets[model].version_tokens[digest] = self.versions.of(model, digest)

    def remove(self, model: str) -> None:
        """Stop exporting a model. Its counts stay in `figures`, which sums up all models."""
        fleet = self.fleets.pop(model)
        _add_figures(self._past, fleet)
        self._statuses.pop(model, None)
        del self._registries[model]
        self.auto.forget(model)
        self.slos.forget(model)
        for digest in fleet.version_tokens:
            self.versions.forget(model, digest)

    def watch(
        self,
        status: Status,
        connections: Callable[[], int],
        writes: Callable[[], Mapping[str, int]] = dict,
        turned_away: Callable[[], Mapping[str, int]] = dict,
        others: Mapping[str, Status] = NO_OTHERS,
    ) -> None:
        """Export values read at scrape time: the first model's fleet, client connections, and the
        other models' fleets by name."""
        self._statuses |= {next(iter(self.fleets)): status, **others}
        self._registry.register(
            Reading(lambda: surface_families(connections(), writes(), turned_away()))
        )
        self._registry.register(Reading(self._of_fleets))
        if self._compat == "vllm":
            self._registry.register(Reading(self._aliases))

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return self._exposition.whole()

    def figures(self, model: str | None = None) -> dict[str, dict[str, float]]:
        """Return counters by label values, and histograms' cumulative counts by upper bound: of one
        model, or summed over all models, including removed ones."""
        is_whole = model is None
        found = {name: dict(values) for name, values in self._past.items() if is_whole}
        for name, fleet in self.fleets.items():
            if is_whole or name == model:
                _add_figures(found, fleet)
        return found

    def places(self) -> dict[Place, tuple[int | None, int | None]]:
        """Return the desired and live number of processes by place, for this server's models; None
        if unknown, as for servers, which do not see one another. If the first model has a number
        with and without its name, the one with its name counts."""
        first = next(iter(self.fleets))
        desired = {
            place._replace(model=place.model or first): count
            for place, count in sorted(self.desired().items())
            if place.model in ("", *self.fleets)
        }
        alive = Tally(
            Place(model, worker.role, worker.labels.get("zone", ""))
            for model, status in self._statuses.items()
            for worker in status().workers
            if worker.state == "alive"
        )
        return {
            one: (desired.get(one), None if one.role is Role.SERVER else alive[one])
            for one in sorted({*desired, *alive})
        }

    def tokens_of(self, model: str) -> dict[str, float]:
        """Return a model's prompt and completion tokens, by counter name."""
        counters = self.fleets[model].counters
        return {name: value_of(counters[name]) for name in ("prompt_tokens", "completion_tokens")}

    def worker_seconds_of(self, model: str) -> float | None:
        """Return a model's total worker-seconds; None if unknown."""
        seconds = self.versions.worker_seconds().get(model)
        return sum(seconds.values()) if seconds else None

    def grammar_checked(self, model: str, verdict: str) -> None:
        """Count a grammar check for a model."""
        if model in self.fleets:  # it may have been removed during the check
            self.fleets[model].counters["grammars_checked"].labels(verdict).inc()

    def _counted(self) -> Iterable[Metric]:
        return _labelled({name: one.collect() for name, one in self._registries.items()})

    def _of_fleets(self) -> Iterable[Metric]:
        shown = {name: fleet_families(status()) for name, status in self._statuses.items()}
        return _labelled(shown)

    def _aliases(self) -> Iterable[Metric]:
        statuses = self._statuses
        is_only = len(statuses) == 1
        found = {
            name: alias_families(
                partial(_family, self.fleets[name]), status(), name, is_only=is_only
            )
            for name, status in statuses.items()
        }
        return by_model(found, label=None)


def _labelled(families: Mapping[str, Iterable[Metric]]) -> Iterable[Metric]:
    """Return all models' families, labelled by `model` if there are several."""
    if len(families) == 1:
        [only] = families.values()
        return only
    return by_model(families)


def _add_figures(figures: dict[str, dict[str, float]], fleet: FleetMetrics) -> None:
    """Add one model's counters and histograms to `figures`."""
    for name in (*fleet.counters, *fleet.histograms):
        values = figures.setdefault(name, {})
        for sample in _family(fleet, name).samples:
            if not sample.name.endswith(("_sum", "_count")):
                key = sample.labels.get("le") or ",".join(sample.labels.values())
                values[key] = values.get(key, 0.0) + sample.value


def value_of(counter: Counter) -> float:
    """Return the value of a counter without labels."""
    [family] = counter.collect()
    return next(one.value for one in family.samples if one.name.endswith("_total"))


def _family(fleet: FleetMetrics, name: str) -> Metric:
    """Return the family of a counter or histogram by its name without the prefix."""
    metric = fleet.counters.get(name) or fleet.histograms[name]
    [family] = metric.collect()
    return family
