"""What the server counts, and how Prometheus reads it.

Every label has a bounded set of values: nothing that a client sends becomes one. Knows no HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    disable_created_metrics,
)
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from triolet.service_class import DEFAULT_SCHEDULING

from ..scheduling.requests import FAREWELL
from .collectors import AliasCollector, FleetCollector, QueueMetrics
from .counters import (
    NO_USAGE,
    REJECTED,
    FaultMetrics,
    HttpMetrics,
    OverloadMetrics,
    QuotaMetrics,
    TenantMetrics,
)
from .exposition import Exposition
from .histogram import TokenHistogram, WorkMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prometheus_client.metrics_core import Metric

    from triolet.service_class import Scheduling, ServiceClass

    from ..contract.generation import Usage
    from ..scheduling.status import FleetStatus

log = structlog.get_logger(__name__)

TTFT_BUCKETS: Final = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
ITL_BUCKETS: Final = (
    .001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5,
)  # fmt: skip
SECONDS_BUCKETS: Final = (.05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)  # fmt: skip
TOKEN_BUCKETS: Final = tuple(float(2**power) for power in range(18))
CHOICE_BUCKETS: Final = (1, 2, 5, 10, 20)

COUNTERS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("requests_received", "Sequences submitted", ()),
    ("requests_accepted", "Sequences taken on", ()),
    ("requests_rejected", "Sequences refused at once", ("code", "class")),
    ("requests", "Sequences by how they ended", ("outcome",)),
    ("prompts_routed", "Prompts by who computes them, and why", ("role", "why")),
    ("attempts_failed", "Attempts that another one followed", ("cause",)),
    ("prompt_tokens", "Tokens in prompts", ()),
    ("cached_prompt_tokens", "Prompt tokens whose KV was there already", ()),
    ("completion_tokens", "Tokens generated", ()),
    ("grammars_checked", "Grammars of requests by what became of them", ("verdict",)),
    ("workers_joined", "Lives of workers that were greeted", ()),
    ("workers_lost", "Workers given up", ("cause",)),
    ("workers_refused", "Workers that do not fit this server", ()),
)
HISTOGRAMS: Final[tuple[tuple[str, str, tuple[float, ...]], ...]] = (
    ("time_to_first_token_seconds", "From submission to the first token", TTFT_BUCKETS),
    ("inter_token_latency_seconds", "Between tokens of one sequence", ITL_BUCKETS),
    ("request_seconds", "From submission to the end", SECONDS_BUCKETS),
    ("queue_seconds", "From submission to dispatch", SECONDS_BUCKETS),
    ("prefill_queue_seconds", "In the prefill worker before it computed", SECONDS_BUCKETS),
    ("prefill_seconds", "A prefill worker computed", SECONDS_BUCKETS),
    ("local_prefill_seconds", "Decode computed a prompt itself", SECONDS_BUCKETS),
    ("decode_seconds", "From the first token to the end", SECONDS_BUCKETS),
    ("inference_seconds", "From dispatch to the end, where there was a token", SECONDS_BUCKETS),
    ("request_token_seconds", "Mean time between the tokens of a completion", ITL_BUCKETS),
    ("request_prompt_tokens", "Prompt by size", TOKEN_BUCKETS),
    ("request_completion_tokens", "Completion by size", TOKEN_BUCKETS),
    ("request_longest_completion_tokens", "Longest completion of a prompt", TOKEN_BUCKETS),
    ("request_max_tokens", "Most tokens that a completion may have", TOKEN_BUCKETS),
    ("request_choices", "Completions of one prompt", CHOICE_BUCKETS),
    ("step_tokens", "Tokens of a worker's step, as means between heartbeats", TOKEN_BUCKETS),
)
LOSSES: Final = (
    *("restarted", "another_life", "protocol", "goodbye", "farewell", "link_gone", "link_full"),
    *("silent", "wedged", "server_paused"),
)
"""Causes of a worker's loss, shown at 0 before the first: Prometheus sees no increase in a counter
that is born at 1."""
MAX_WORDS: Final = 32
"""Values of one label that come from elsewhere in this process; the next ones are `other`."""


class Words:
    """Bounds a label: the first words keep their names."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def bounded(self, word: str) -> str:
        """Return the word, or `other` where there are too many."""
        if word not in self._seen:
            if len(self._seen) >= MAX_WORDS:
                return "other"
            self._seen.add(word)
        return word


class Metrics:
    """The counters of this process; also the fleet's observer.

    Args:
      model_name: label of the alias names.
      compat: `vllm` for alias names, `none` for own names only.

    Attributes:
      work: told of sizes, of requests and of steps.
      scrape: returns what `exposition` does; others have their turn while it is written.
    """

    def __init__(self, model_name: str, compat: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._model_name = model_name
        self._compat = compat
        self._words = {name: Words() for name in ("outcome", "code", "cause")}
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.faults = FaultMetrics(self._registry)
        self.overload = OverloadMetrics(self._registry)
        self.http = HttpMetrics(self._registry)
        self.tenants = TenantMetrics(self._registry)
        self.quotas = QuotaMetrics(self._registry)
        self._queue = QueueMetrics(self._registry)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._counters = {
            name: Counter(f"triolet_{name}", text, labels, registry=self._registry)
            for name, text, labels in COUNTERS
        }
        self._histograms = {
            name: TokenHistogram(f"triolet_{name}", text, buckets, self._registry)
            for name, text, buckets in HISTOGRAMS
        }
        self.work = WorkMetrics(self._histograms)
        for cause in LOSSES:
            self._counters["workers_lost"].labels(cause)
        self._exposition = Exposition(self._registry.collect)
        self.scrape = self._exposition.take
        self._itl = self._histograms["inter_token_latency_seconds"]

    def watch(
        self,
        status: Callable[[], FleetStatus],
        connections: Callable[[], int],
        writes: Callable[[], Mapping[str, int]] = dict,
        turned_away: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Read these whenever the metrics are."""
        self._registry.register(FleetCollector(status, connections, writes, turned_away))
        if self._compat == "vllm":
            aliases = AliasCollector(self._own_family, status, self._model_name)
            self._registry.register(aliases)

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
        """Somebody's grammar was looked at, or not for want of time."""
        self._counters["grammars_checked"].labels(verdict).inc()

    def request_received(self) -> None:
        """Somebody submitted."""
        self._counters["requests_received"].inc()

    def request_rejected(self, code: str, scheduling: Scheduling = DEFAULT_SCHEDULING) -> None:
        """It was refused before anything was begun."""
        code = self._words["code"].bounded(code)
        service_class = scheduling.service_class.name.lower()
        self._counters["requests_rejected"].labels(code, service_class).inc()
        self.tenants.ended(scheduling, REJECTED, NO_USAGE)

    def request_accepted(self) -> None:
        """It will end in exactly one way."""
        self._counters["requests_accepted"].inc()

    def request_dispatched(self, queue_s: float, service_class: ServiceClass) -> None:
        """Its first attempt begins, after so long in the queue."""
        self._histograms["queue_seconds"].observe(queue_s)
        self._queue.dispatched(queue_s, service_class)

    def prefill_computed(self, queue_s: float, compute_s: float) -> None:
        """A prefill worker said how long a prompt waited there and took."""
        self._histograms["prefill_queue_seconds"].observe(queue_s)
        self._histograms["prefill_seconds"].observe(compute_s)

    def prompt_routed(self, role: str, why: str) -> None:
        """It is settled who computes a prompt, and why; both are words of our own."""
        self._counters["prompts_routed"].labels(str(role), str(why)).inc()

    def local_prefill_computed(self, elapsed_s: float) -> None:
        """Decode computed a prompt itself."""
        self._histograms["local_prefill_seconds"].observe(elapsed_s)

    def first_token(self, ttft_s: float) -> None:
        """Its first token came."""
        self._histograms["time_to_first_token_seconds"].observe(ttft_s)

    def next_token(self, itl_s: float) -> None:
        """Another token came, so long after the one before."""
        self._itl.observe(itl_s)

    def attempt_failed(self, cause: str) -> None:
        """An attempt is over and the request goes on with another one."""
        self._counters["attempts_failed"].labels(self._words["cause"].bounded(cause)).inc()

    def request_ended(
        self,
        outcome: str,
        usage: Usage,
        elapsed_s: float,
        scheduling: Scheduling = DEFAULT_SCHEDULING,
    ) -> None:
        """It got its terminal event."""
        outcome = self._words["outcome"].bounded(str(outcome))
        self._counters["requests"].labels(outcome).inc()
        self.tenants.ended(scheduling, outcome, usage)
        self._counters["prompt_tokens"].inc(usage.prompt_tokens)
        self._counters["cached_prompt_tokens"].inc(usage.cached_tokens)
        self._counters["completion_tokens"].inc(usage.completion_tokens)
        self._histograms["request_seconds"].observe(elapsed_s)
        if usage.prompt_tokens:
            self._histograms["request_prompt_tokens"].observe(usage.prompt_tokens)
        self._histograms["request_completion_tokens"].observe(usage.completion_tokens)
        if usage.ttft_s is not None:
            decode_s = max(0.0, elapsed_s - usage.ttft_s)
            self._histograms["decode_seconds"].observe(decode_s)
            self._histograms["inference_seconds"].observe(max(0.0, elapsed_s - usage.queue_s))
            if usage.completion_tokens > 1:
                mean_s = decode_s / (usage.completion_tokens - 1)
                self._histograms["request_token_seconds"].observe(mean_s)

    def worker_joined(self, worker: str) -> None:
        """A worker, or its next life, was greeted."""
        self._counters["workers_joined"].inc()
        log.info("worker_joined", worker=worker)

    def worker_lost(self, worker: str, cause: str) -> None:
        """A worker was given up."""
        self._counters["workers_lost"].labels(self._words["cause"].bounded(cause)).inc()
        # One that was drained has moved or ended what it ran: a restart that somebody asked for.
        tell = log.info if cause == FAREWELL else log.warning
        tell("worker_lost", worker=worker, cause=cause)

    def worker_refused(self, worker: str, reason: str) -> None:
        """A worker and this server cannot work together; an operator has to act."""
        self._counters["workers_refused"].inc()
        log.error("worker_refused", worker=worker, reason=reason)

    def _own_family(self, name: str) -> Metric:
        """Return a counter or histogram by its own name, without the prefix."""
        metric = self._counters.get(name) or self._histograms[name]
        [family] = metric.collect()
        return family
