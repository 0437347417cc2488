"""Counters that increase as events happen: HTTP requests, overload, quotas, tenants and model
versions. Values read at scrape time are in collectors.py."""

from __future__ import annotations

from collections import Counter as Counts
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily

from triolet.config import TurnsConfig

from ..contract.generation import Usage
from ..scheduling.status import OverloadObserver
from ..tenants.memory_store import QuotaObserver
from ..text.turns import Turns
from .collectors import counts, door_families, family, gauge, kept_families
from .exposition import Reading
from .histogram import TokenHistogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any, TypeAlias

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from triolet.service_class import ServiceClass

    from ..cache.store import ResponseStore
    from ..tenants.quotas import Quotas
    from ..tenants.tenancy import TenancyReport

    WorkerSeconds: TypeAlias = Mapping[str, Mapping[str, float]]
    """Worker-seconds by model and version."""


class HttpMetrics:
    """Counts HTTP requests and related events.

    Args:
      registry: the registry for the counters.

    Attributes:
      kept: stores of kept answers, by metric name prefix.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.kept: dict[str, ResponseStore] = {}
        registry.register(Reading(lambda: kept_families(self.kept)))
        self._door = partial(door_families, Turns(1, TurnsConfig()), int, {})
        registry.register(Reading(lambda: self._door()))
        self._requests = Counter(
            "triolet_http_requests",
            "Requests by route",
            ("endpoint",),
            registry=registry,
        )
        self._errors = Counter(
            "triolet_http_errors",
            "Requests answered with an error",
            ("status",),
            registry=registry,
        )
        self._of_queue: Counts[str] = Counts()
        self._batch_lines = Counter(
            "triolet_batch_lines",
            "Batch lines by outcome, and their delays by reason",
            ("outcome",),
            registry=registry,
        )
        self._ignored = Counter(
            "triolet_ignored_parameters",
            "Ignored request parameters that this server does not support",
            ("parameter",),
            registry=registry,
        )
        self._resumptions = Counter(
            "triolet_resumptions",
            "Resumable answers and what became of them",
            ("what",),
            registry=registry,
        )

    def ignored(self, name: str) -> None:
        """Count an ignored parameter; its name is from a bounded set."""
        self._ignored.labels(name).inc()

    def batch_line(self, outcome: str) -> None:
        """Count a batch line that this or another server has answered."""
        self._batch_lines.labels(outcome).inc()

    def request(self, endpoint: str) -> None:
        """Count a request to one of the routes."""
        self._requests.labels(endpoint).inc()

    def error(self, status: int, *, is_of_queue: bool = False) -> None:
        """Count an error response; `is_of_queue` if the queue has counted the refusal too."""
        self._errors.labels(str(status)).inc()
        self._of_queue[str(status)] += is_of_queue

    def errors(self) -> dict[str, float]:
        """Return the number of error responses by status."""
        [family] = self._errors.collect()
        return {
            sample.labels["status"]: sample.value
            for sample in family.samples
            if sample.name.endswith("_total")
        }

    def errors_of_queue(self, status: str) -> int:
        """Return how many error responses with a status the queue has counted too."""
        return self._of_queue[status]

    def resumption(self, what: str) -> None:
        """Count an event of a resumable answer; `what` is from a fixed set."""
        self._resumptions.labels(what).inc()

    def watch_door(
        self,
        turns: Turns[Any],
        held_bytes: Callable[[], int],
        refused_bodies: Mapping[Any, int],
    ) -> None:
        """Export text process jobs, bytes of request bodies, and refused bodies by reason."""
        self._door = partial(door_families, turns, held_bytes, refused_bodies)


log = structlog.get_logger()

ERROR_BUCKETS: Final = (.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40)  # fmt: skip


class OverloadMetrics(OverloadObserver):
    """Counts overload events of the scheduler (server/scheduling/status.py).

    Args:
      registry: the registry for the counters.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refused = Counter(
            "triolet_overload_refused",
            "Requests refused or dropped because of overload",
            ("reason", "service_class"),
            registry=registry,
        )
        self._changes = Counter(
            "triolet_brownout_changes",
            "Brownout level changes, by the new level",
            ("level",),
            registry=registry,
        )
        self._early = TokenHistogram(
            "triolet_ttft_earlier_seconds",
            "How much earlier than predicted first tokens came",
            ERROR_BUCKETS,
            registry,
        )
        self._late = TokenHistogram(
            "triolet_ttft_later_seconds",
            "How much later than predicted first tokens came",
            ERROR_BUCKETS,
            registry,
        )

    def refused(self, reason: str, service_class: ServiceClass) -> None:
        """Count a request refused or dropped because of overload."""
        self._refused.labels(reason, service_class.name.lower()).inc()

    def predicted(self, predicted_s: float, ttft_s: float) -> None:
        """Record a first token's time and its prediction."""
        if ttft_s > predicted_s:
            self._late.observe(ttft_s - predicted_s)
        else:
            self._early.observe(predicted_s - ttft_s)

    def level_changed(self, was: int, level: int, pressure: float) -> None:
        """Count and log a change of the brownout level."""
        self._changes.labels(str(int(level))).inc()
        tell = log.warning if level > was else log.info
        tell("brownout", now=int(level), was=int(was), pressure=round(pressure, 2))


class AutoMetrics:
    """Counts requests for `auto`, for which the server chose the model.

    Args:
      registry: the registry for the counters.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._chosen = Counter(
            "triolet_auto_requests",
            "Requests for auto, by chosen model and reason",
            ("model", "reason"),
            registry=registry,
        )
        self._cost = Counter(
            "triolet_auto_cost",
            "Charges for requests for auto, by chosen model",
            ("model",),
            registry=registry,
        )
        self._largest_cost = Counter(
            "triolet_auto_largest_cost",
            "What the same requests would have cost on the largest model of their ladder",
            ("model",),
            registry=registry,
        )
        self._reasons: dict[str, set[str]] = {}

    def chosen(self, model: str, reason: str) -> None:
        """Count a chosen model; the reason is from a fixed set."""
        self._reasons.setdefault(model, set()).add(reason)
        self._chosen.labels(model, reason).inc()

    def charged(self, model: str, amount: float, on_largest: float) -> None:
        """Count a charge for `auto`, and its cost on the largest model."""
        self._cost.labels(model).inc(amount)
        self._largest_cost.labels(model).inc(on_largest)

    def forget(self, model: str) -> None:
        """Remove a model's series."""
        for reason in self._reasons.pop(model, ()):
            self._chosen.remove(model, reason)
        for cost in (self._cost, self._largest_cost):
            cost.labels(model)  # `remove` raises if the series does not exist
            cost.remove(model)


RESERVE_BUCKETS: Final = (.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1)  # fmt: skip


class QuotaMetrics(QuotaObserver):
    """Counts events of tenants' limits (server/tenants/quotas.py).

    Args:
      registry: the registry for the metrics.
      auto: counts charges for `auto`.
    """

    def __init__(self, registry: CollectorRegistry, auto: AutoMetrics) -> None:
        self._auto = auto
        self._refused = Counter(
            "triolet_quota_refusals",
            "Requests refused because of a limit of their tenant",
            ("limit",),
            registry=registry,
        )
        self._reserved = Histogram(
            "triolet_quota_reserve_seconds",
            "Time to reserve quota before a request is queued",
            buckets=RESERVE_BUCKETS,
            registry=registry,
        )
        self._unreserved = Counter(
            "triolet_tenant_unreserved_requests",
            "Requests counted without tokens: refused after work, or text operations only",
            ("tenant",),
            registry=registry,
        )
        self._cost = Counter(
            "triolet_tenant_cost",
            "Charges to tenants, in the operator's currency",
            ("tenant",),
            registry=registry,
        )
        self._alerts = Counter(
            "triolet_budget_alerts",
            "Times a tenant's spending crossed a share of its budget",
            ("tenant", "share"),
            registry=registry,
        )
        self._failures = Counter(
            "triolet_quota_store_failures",
            "Failed calls to the shared quota store",
            registry=registry,
        )
        self._reservations = Gauge(
            "triolet_quota_reservations", "Quota reservations not settled yet", registry=registry
        )
        self._open_sequences = Gauge(
            "triolet_quota_open_sequences", "Sequences not charged yet", registry=registry
        )
        self._store_up = Gauge(
            "triolet_quota_store_up",
            "1 while limits are shared by all servers, 0 while each server enforces its own part",
            registry=registry,
        )
        self._servers = Gauge(
            "triolet_quota_servers",
            "Servers that share the limits, including this one, as far as it knows",
            registry=registry,
        )

    def watch(self, quotas: Quotas) -> None:
        """Export the reservations in flight and the state of the store."""
        self._reservations.set_function(lambda: quotas.store.num_reserved)
        self._open_sequences.set_function(lambda: quotas.num_open)
        self._store_up.set_function(lambda: quotas.store.is_well)
        self._servers.set_function(lambda: quotas.store.num_servers)

    def refused(self, limit: str) -> None:
        """Count a refusal because of a limit."""
        self._refused.labels(limit).inc()

    def reserved(self, elapsed_s: float) -> None:
        """Record the time of a reservation."""
        self._reserved.observe(elapsed_s)

    def unreserved(self, tenant: str) -> None:
        """Count a request without a reservation."""
        self._unreserved.labels(tenant).inc()

    def cost(self, tenant: str, amount: float) -> None:
        """Count a charge to a tenant."""
        self._cost.labels(tenant).inc(amount)

    def auto_cost(self, model: str, amount: float, on_largest: float) -> None:
        """Count a charge for `auto`."""
        self._auto.charged(model, amount, on_largest)

    def budget_watched(self, tenant: str, share: float) -> None:
        """Export the counter at 0: Prometheus sees no increase in one that starts at 1."""
        self._alerts.labels(tenant, f"{share:g}")

    def budget_alert(self, tenant: str, share: float) -> None:
        """Count a tenant's spending crossing a share of its budget."""
        self._alerts.labels(tenant, f"{share:g}").inc()

    def store_failed(self) -> None:
        """Count a failed call to the shared store."""
        self._failures.inc()


REJECTED: Final = "rejected"
"""Outcome of a refused request."""
NO_USAGE: Final = Usage(0, 0)


class TenantMetrics:
    """Counts each tenant's sequences when they end.

    Args:
      registry: the registry for the counters.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._requests = Counter(
            "triolet_tenant_requests",
            "A tenant's sequences by class and outcome",
            ("tenant", "class", "outcome"),
            registry=registry,
        )
        self._tokens = Counter(
            "triolet_tenant_tokens",
            "A tenant's tokens by class and kind; prompt includes cached",
            ("tenant", "class", "kind"),
            registry=registry,
        )

    def watch(self, report: Callable[[], TenancyReport]) -> None:
        """Export the tenants file's state, read at scrape time."""
        self._registry.register(Reading(lambda: _tenants_file_families(report())))

    def count(self, tenant: str, service_class: ServiceClass, outcome: str, usage: Usage) -> None:
        """Count a sequence that ended or was refused."""
        if not tenant:
            return
        name = service_class.name.lower()
        self._requests.labels(tenant, name, outcome).inc()
        for kind, count in (
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("completion", usage.completion_tokens),
        ):
            if count:
                self._tokens.labels(tenant, name, kind).inc(count)


UNVERSIONED: Final = ""
"""The version of a model that is in no store."""


class VersionMetrics:
    """Counts the tokens of each version of each model.

    Args:
      registry: the registry for the counters.

    Attributes:
      worker_seconds: returns worker-seconds by model and version.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens = Counter(
            "triolet_version_tokens",
            "Tokens of a model version by kind; prompt includes cached",
            ("model", "version", "kind"),
            registry=registry,
        )
        self.worker_seconds: Callable[[], WorkerSeconds] = dict
        registry.register(Reading(self._worker_families))

    def of(self, model: str, version: str) -> VersionTokens:
        """Return the counters of one version.

        Args:
          model: the model's name.
          version: its digest, or UNVERSIONED.
        """
        kinds = [self._tokens.labels(model, version, kind) for kind in TOKEN_KINDS]
        return VersionTokens(*kinds)

    def forget(self, model: str, version: str) -> None:
        """Remove the series of a removed model's version."""
        for kind in TOKEN_KINDS:
            self._tokens.remove(model, version, kind)

    def watch(self, worker_seconds: Callable[[], WorkerSeconds]) -> None:
        """Export worker-seconds by model and version, read at scrape time."""
        self.worker_seconds = worker_seconds

    def _worker_families(self) -> Iterator[Metric]:
        rows = (
            ((model, version), seconds)
            for model, versions in self.worker_seconds().items()
            for version, seconds in versions.items()
        )
        yield family(
            CounterMetricFamily,
            "worker_seconds",
            "Total running time of a model version's worker processes",
            ("model", "version"),
            rows,
        )


class VersionTokens(NamedTuple):
    """The token counters of one version."""

    prompt: Counter
    cached: Counter
    completion: Counter

    def add(self, usage: Usage) -> None:
        """Add one sequence's tokens."""
        self.prompt.inc(usage.prompt_tokens)
        self.cached.inc(usage.cached_tokens)
        self.completion.inc(usage.completion_tokens)


TOKEN_KINDS: Final = VersionTokens._fields


def _tenants_file_families(report: TenancyReport) -> Iterator[Metric]:
    """Yield the state of the tenants file; zeros if there is none."""
    yield gauge("tenants", "Known tenants", report.tenants)
    yield gauge(
        "tenants_file_refused",
        "1 while the newest tenants file is refused and an older one applies",
        bool(report.problem),
    )
    files = {"taken": report.num_taken, "refused": report.num_refused}
    yield counts("tenants_files", "Tenants files by outcome", "outcome", files)
