"""Counters that are raised when something happens: requests by route, refusals, quotas, tokens of
tenants and versions. What is read at a scrape is in collectors.py.
"""

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
    """By model and version."""


class HttpMetrics:
    """Told of requests by the surface.

    Args:
      registry: where the counters are shown.

    Attributes:
      kept: answers that are kept, by how the names of their metrics begin.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.kept: dict[str, ResponseStore] = {}
        registry.register(Reading(lambda: kept_families(self.kept)))
        self._door = partial(door_families, Turns(1, TurnsConfig()), int, {})
        registry.register(Reading(lambda: self._door()))
        self._requests = Counter(
            "triolet_http_requests",
            "Requests by the route that answered",
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
            "Lines of batches by how they ended, and what they waited out",
            ("outcome",),
            registry=registry,
        )
        self._ignored = Counter(
            "triolet_ignored_parameters",
            "Parameters of requests that this server does not know and that had no effect",
            ("parameter",),
            registry=registry,
        )
        self._resumptions = Counter(
            "triolet_resumptions",
            "Answers that clients may come back to, and what became of them",
            ("what",),
            registry=registry,
        )

    def ignored(self, name: str) -> None:
        """A request had a parameter without effect; its name is from a bounded set."""
        self._ignored.labels(name).inc()

    def batch_line(self, outcome: str) -> None:
        """A line of a batch has its answer, or another server has answered it."""
        self._batch_lines.labels(outcome).inc()

    def request(self, endpoint: str) -> None:
        """A request came to one of the routes, of which there are as many as the map has."""
        self._requests.labels(endpoint).inc()

    def error(self, status: int, *, is_of_queue: bool = False) -> None:
        """A request was answered with an error, perhaps one that the queue has counted too."""
        self._errors.labels(str(status)).inc()
        self._of_queue[str(status)] += is_of_queue

    def errors(self) -> dict[str, float]:
        """Return how many requests were answered with an error, by status."""
        [family] = self._errors.collect()
        return {
            sample.labels["status"]: sample.value
            for sample in family.samples
            if sample.name.endswith("_total")
        }

    def errors_of_queue(self, status: str) -> int:
        """Return how many of those with a status the queue has counted too."""
        return self._of_queue[status]

    def resumption(self, what: str) -> None:
        """An answer was begun or joined that outlives its connection, by a word of our own."""
        self._resumptions.labels(what).inc()

    def watch_door(
        self,
        turns: Turns[Any],
        held_bytes: Callable[[], int],
        refused_bodies: Mapping[Any, int],
    ) -> None:
        """Show from now on: jobs of text processes, bytes of bodies, refused bodies by reason."""
        self._door = partial(door_families, turns, held_bytes, refused_bodies)


log = structlog.get_logger()

ERROR_BUCKETS: Final = (.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40)  # fmt: skip


class OverloadMetrics(OverloadObserver):
    """Told of overload by the fleet (server/scheduling/status.py).

    Args:
      registry: where the counters are shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refused = Counter(
            "triolet_overload_refused",
            "Requests refused or dropped because there was too much",
            ("reason", "service_class"),
            registry=registry,
        )
        self._changes = Counter(
            "triolet_brownout_changes",
            "Brownout levels by which one was taken",
            ("level",),
            registry=registry,
        )
        self._early = TokenHistogram(
            "triolet_ttft_earlier_seconds",
            "By how much first tokens came before they were expected",
            ERROR_BUCKETS,
            registry,
        )
        self._late = TokenHistogram(
            "triolet_ttft_later_seconds",
            "By how much first tokens came after they were expected",
            ERROR_BUCKETS,
            registry,
        )

    def refused(self, reason: str, service_class: ServiceClass) -> None:
        """A request was refused because there is too much, or dropped before anything was spent."""
        self._refused.labels(reason, service_class.name.lower()).inc()

    def predicted(self, predicted_s: float, ttft_s: float) -> None:
        """A first token came, and when it had been expected."""
        if ttft_s > predicted_s:
            self._late.observe(ttft_s - predicted_s)
        else:
            self._early.observe(predicted_s - ttft_s)

    def level_changed(self, was: int, level: int, pressure: float) -> None:
        """More or less is given up than before; an operator wants to know."""
        self._changes.labels(str(int(level))).inc()
        tell = log.warning if level > was else log.info
        tell("brownout", now=int(level), was=int(was), pressure=round(pressure, 2))


class AutoMetrics:
    """Counts the models that were chosen for requests which left them open.

    Args:
      registry: where they are shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._chosen = Counter(
            "triolet_auto_requests",
            "Requests that left the model open, by the chosen one and why",
            ("model", "reason"),
            registry=registry,
        )
        self._cost = Counter(
            "triolet_auto_cost",
            "What requests were charged for whose model was chosen here, by that model",
            ("model",),
            registry=registry,
        )
        self._largest_cost = Counter(
            "triolet_auto_largest_cost",
            "What the same tokens would have cost on the last model of their ladder",
            ("model",),
            registry=registry,
        )
        self._reasons: dict[str, set[str]] = {}

    def chosen(self, model: str, reason: str) -> None:
        """A model was chosen, for a reason of our own."""
        self._reasons.setdefault(model, set()).add(reason)
        self._chosen.labels(model, reason).inc()

    def charged(self, model: str, amount: float, on_largest: float) -> None:
        """A request for `auto` was charged; and its cost on the largest one."""
        self._cost.labels(model).inc(amount)
        self._largest_cost.labels(model).inc(on_largest)

    def forget(self, model: str) -> None:
        """Show nothing of a model any more, which was removed."""
        for reason in self._reasons.pop(model, ()):
            self._chosen.remove(model, reason)
        for cost in (self._cost, self._largest_cost):
            cost.labels(model)  # `remove` wants a series that is there
            cost.remove(model)


RESERVE_BUCKETS: Final = (.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1)  # fmt: skip


class QuotaMetrics(QuotaObserver):
    """Told by the limits of tenants (server/tenants/quotas.py).

    Args:
      registry: where they are shown.
      auto: told of charges for requests for `auto`.
    """

    def __init__(self, registry: CollectorRegistry, auto: AutoMetrics) -> None:
        self._auto = auto
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

    def auto_cost(self, model: str, amount: float, on_largest: float) -> None:
        """A request for `auto` was charged."""
        self._auto.charged(model, amount, on_largest)

    def budget_watched(self, tenant: str, share: float) -> None:
        """Show the counter at 0: Prometheus sees no increase in one that is born at 1."""
        self._alerts.labels(tenant, f"{share:g}")

    def budget_alert(self, tenant: str, share: float) -> None:
        """A tenant's spend crossed a share of its budget."""
        self._alerts.labels(tenant, f"{share:g}").inc()

    def store_failed(self) -> None:
        """A call of the shared accounts failed."""
        self._failures.inc()


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
        self._registry.register(Reading(lambda: _tenants_file_families(report())))

    def count(self, tenant: str, service_class: ServiceClass, outcome: str, usage: Usage) -> None:
        """Count a sequence that ended, or was refused."""
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
    """Counts what each version of each model was used for.

    Args:
      registry: where it is shown.

    Attributes:
      worker_seconds: returns those of each model by version.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens = Counter(
            "triolet_version_tokens",
            "Tokens of a model's version by kind; prompt holds cached",
            ("model", "version", "kind"),
            registry=registry,
        )
        self.worker_seconds: Callable[[], WorkerSeconds] = dict
        registry.register(Reading(self._worker_families))

    def of(self, model: str, version: str) -> VersionTokens:
        """Return what counts the tokens of one version.

        Args:
          model: its name.
          version: its digest, or UNVERSIONED.
        """
        kinds = [self._tokens.labels(model, version, kind) for kind in TOKEN_KINDS]
        return VersionTokens(*kinds)

    def forget(self, model: str, version: str) -> None:
        """Show the tokens of a version no more, whose model was removed."""
        for kind in TOKEN_KINDS:
            self._tokens.remove(model, version, kind)

    def watch(self, worker_seconds: Callable[[], WorkerSeconds]) -> None:
        """Read the worker-seconds of each model by version whenever the metrics are."""
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
            "How long worker processes of a model's version have run, together",
            ("model", "version"),
            rows,
        )


class VersionTokens(NamedTuple):
    """Counts the tokens of one version."""

    prompt: Counter
    cached: Counter
    completion: Counter

    def add(self, usage: Usage) -> None:
        """Add those of one sequence."""
        self.prompt.inc(usage.prompt_tokens)
        self.cached.inc(usage.cached_tokens)
        self.completion.inc(usage.completion_tokens)


TOKEN_KINDS: Final = VersionTokens._fields


def _tenants_file_families(report: TenancyReport) -> Iterator[Metric]:
    """Yield what is known of the file of tenants; zeros where there is none."""
    yield gauge("tenants", "Tenants that there are", report.tenants)
    yield gauge(
        "tenants_file_refused",
        "1 while the newest file of tenants is not what counts",
        bool(report.problem),
    )
    files = {"taken": report.num_taken, "refused": report.num_refused}
    yield counts("tenants_files", "Files of tenants by what became of them", "outcome", files)
