"""What the server counts, and how Prometheus reads it.

Own names are the truth. The same numbers also go by the names of another server, because dashboards
and the endpoint pickers of gateways are written for those. Every label has a bounded set of values:
nothing that a client sends becomes one. Knows no HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from triolet.ids import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .api.ports import FleetView, WorkerView
    from .generation import Usage

log = structlog.get_logger(__name__)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

TTFT_BUCKETS: Final = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
ITL_BUCKETS: Final = (
    .001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5,
)  # fmt: skip
SECONDS_BUCKETS: Final = (.05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)  # fmt: skip
TOKEN_BUCKETS: Final = tuple(float(2**power) for power in range(18))

COUNTERS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("requests_received", "Sequences submitted", ()),
    ("requests_accepted", "Sequences taken on", ()),
    ("requests_rejected", "Sequences refused at once", ("code",)),
    ("requests", "Sequences by how they ended", ("outcome",)),
    ("attempts_failed", "Attempts that another one followed", ("cause",)),
    ("http_errors", "Requests answered with an error", ("status",)),
    ("prompt_tokens", "Tokens in prompts", ()),
    ("cached_prompt_tokens", "Prompt tokens whose KV was there already", ()),
    ("completion_tokens", "Tokens generated", ()),
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
    ("decode_seconds", "From the first token to the end", SECONDS_BUCKETS),
    ("request_prompt_tokens", "Prompt by size", TOKEN_BUCKETS),
    ("request_completion_tokens", "Completion by size", TOKEN_BUCKETS),
)
ALIASES: Final = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "request_seconds",
    "request_queue_time_seconds": "queue_seconds",
    "request_prefill_time_seconds": "prefill_seconds",
    "request_decode_time_seconds": "decode_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_completion_tokens",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "completion_tokens",
    "prefix_cache_queries": "prompt_tokens",
    "prefix_cache_hits": "cached_prompt_tokens",
    "request_success": "requests",
}
"""vLLM's name, and ours for the same number."""

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
    """

    def __init__(self, model_name: str, compat: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._model_name = model_name
        self._compat = compat
        self._words = {name: Words() for name in ("outcome", "code", "cause")}
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._counters = {
            name: Counter(f"triolet_{name}", text, labels, registry=self._registry)
            for name, text, labels in COUNTERS
        }
        self._histograms = {
            name: Histogram(f"triolet_{name}", text, buckets=buckets, registry=self._registry)
            for name, text, buckets in HISTOGRAMS
        }

    def watch(self, status: Callable[[], FleetView], connections: Callable[[], int]) -> None:
        """Read these whenever the metrics are."""
        self._registry.register(FleetCollector(status, connections))
        if self._compat == "vllm":
            aliases = AliasCollector(self._own_families, status, self._model_name)
            self._registry.register(aliases)

    def exposition(self) -> bytes:
        """Return everything in Prometheus's text form."""
        return generate_latest(self._registry)

    def http_error(self, status: int) -> None:
        """A request was answered with an error."""
        self._counters["http_errors"].labels(str(status)).inc()

    def request_received(self) -> None:
        """Somebody submitted."""
        self._counters["requests_received"].inc()

    def request_rejected(self, code: str) -> None:
        """It was refused before anything was begun."""
        self._counters["requests_rejected"].labels(self._words["code"].bounded(code)).inc()

    def request_accepted(self) -> None:
        """It will end in exactly one way."""
        self._counters["requests_accepted"].inc()

    def request_dispatched(self, queue_s: float) -> None:
        """Its first attempt begins, after so long in the queue."""
        self._histograms["queue_seconds"].observe(queue_s)

    def prefill_computed(self, queue_s: float, compute_s: float) -> None:
        """A prefill worker said how long a prompt waited there and took."""
        self._histograms["prefill_queue_seconds"].observe(queue_s)
        self._histograms["prefill_seconds"].observe(compute_s)

    def first_token(self, ttft_s: float) -> None:
        """Its first token came."""
        self._histograms["time_to_first_token_seconds"].observe(ttft_s)

    def next_token(self, itl_s: float) -> None:
        """Another token came, so long after the one before."""
        self._histograms["inter_token_latency_seconds"].observe(itl_s)

    def attempt_failed(self, cause: str) -> None:
        """An attempt is over and the request goes on with another one."""
        self._counters["attempts_failed"].labels(self._words["cause"].bounded(cause)).inc()

    def request_ended(self, outcome: str, usage: Usage, elapsed_s: float) -> None:
        """It got its terminal event."""
        self._counters["requests"].labels(self._words["outcome"].bounded(str(outcome))).inc()
        self._counters["prompt_tokens"].inc(usage.prompt_tokens)
        self._counters["cached_prompt_tokens"].inc(usage.cached_tokens)
        self._counters["completion_tokens"].inc(usage.completion_tokens)
        self._histograms["request_seconds"].observe(elapsed_s)
        self._histograms["request_prompt_tokens"].observe(usage.prompt_tokens)
        self._histograms["request_completion_tokens"].observe(usage.completion_tokens)
        if usage.ttft_s is not None:
            self._histograms["decode_seconds"].observe(max(0.0, elapsed_s - usage.ttft_s))

    def worker_joined(self, worker: str) -> None:
        """A worker, or its next life, was greeted."""
        self._counters["workers_joined"].inc()
        log.info("worker joined", worker=worker)

    def worker_lost(self, worker: str, cause: str) -> None:
        """A worker was given up."""
        self._counters["workers_lost"].labels(self._words["cause"].bounded(cause)).inc()
        log.warning("worker lost", worker=worker, cause=cause)

    def worker_refused(self, worker: str, reason: str) -> None:
        """A worker and this server cannot work together; an operator has to act."""
        self._counters["workers_refused"].inc()
        log.error("worker refused", worker=worker, reason=reason)

    def _own_families(self) -> dict[str, Metric]:
        """Return every counter and histogram by its own name, without the prefix."""
        own: dict[str, Counter | Histogram] = {**self._counters, **self._histograms}
        return {name: family for name, metric in own.items() for family in metric.collect()}


class FleetCollector(Collector):
    """What the fleet and the surface look like at the moment of the scrape."""

    def __init__(self, status: Callable[[], FleetView], connections: Callable[[], int]) -> None:
        self._status = status
        self._connections = connections

    def collect(self) -> Iterable[Metric]:
        """Yield one family after the other."""
        status = self._status()
        yield _gauge("triolet_requests_queued", "Requests that wait for a worker", status.queued)
        yield _gauge("triolet_requests_running", "Requests that workers serve", status.running)
        yield _gauge("triolet_connections", "Open client connections", self._connections())
        yield from self._pools(status)
        yield from self._workers(status)

    def _pools(self, status: FleetView) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "triolet_kv_blocks", "KV blocks by pool and state", labels=("pool", "worker", "state")
        )
        received = CounterMetricFamily(
            "triolet_kv_bytes_received", "KV written into decode pools", labels=("worker",)
        )
        sent = CounterMetricFamily(
            "triolet_kv_bytes_sent", "KV shipped by prefill", labels=("worker",)
        )
        block_tokens = GaugeMetricFamily(
            "triolet_kv_block_tokens", "Tokens that one KV block holds", labels=("pool", "worker")
        )
        block_bytes = GaugeMetricFamily(
            "triolet_kv_block_bytes", "Bytes of one KV block", labels=("pool", "worker")
        )
        for worker in status.workers:
            if worker.capacity is None:
                continue  # it has not said who it is: its address would become a label for ever
            pool = (worker.role.value, worker.name)
            block_tokens.add_metric(pool, worker.capacity.block_size)
            block_bytes.add_metric(pool, worker.capacity.bytes_per_block)
            for state, count in _blocks_by_state(worker):
                blocks.add_metric((*pool, state), count)
            family = received if worker.role is Role.DECODE else sent
            family.add_metric((worker.name,), worker.load.kv_bytes)
        yield from (blocks, received, sent, block_tokens, block_bytes)

    def _workers(self, status: FleetView) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "triolet_worker_up", "1 for a worker that is live", labels=("role", "worker")
        )
        counters = {
            name: CounterMetricFamily(f"triolet_worker_{name}", text, labels=("role", "worker"))
            for name, text in (
                ("steps", "Device steps"),
                ("computed_tokens", "Tokens computed"),
                ("stale_frames", "Frames dropped because they named no live lease"),
                ("bad_digests", "KV chunks whose digest was wrong"),
                ("preemptions", "Sequences that lost their blocks to others"),
            )
        }
        for worker in status.workers:
            labels = (worker.role.value, worker.name)
            up.add_metric(labels, float(worker.state == "alive"))
            for name, family in counters.items():
                family.add_metric(labels, getattr(worker.load, name))
        yield up
        yield from counters.values()


class AliasCollector(Collector):
    """The same numbers under the names that vLLM's dashboards and endpoint pickers read."""

    def __init__(
        self,
        families: Callable[[], dict[str, Metric]],
        status: Callable[[], FleetView],
        model_name: str,
    ) -> None:
        self._families = families
        self._status = status
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterable[Metric]:
        """Yield one family after the other."""
        families = self._families()
        for alias, name in ALIASES.items():
            yield self._renamed(alias, families[name])
        status = self._status()
        used, total = _decode_blocks(status)
        yield self._gauge("num_requests_waiting", status.queued)
        yield self._gauge("num_requests_running", status.running)
        yield self._gauge("kv_cache_usage_perc", used / total if total else 0.0)
        preemptions = sum(worker.load.preemptions for worker in status.workers)
        yield self._counter("num_preemptions", preemptions)
        sizes = {w.capacity.block_size for w in status.workers if w.capacity is not None}
        info = InfoMetricFamily("vllm:cache_config", "", labels=())
        info.add_metric(
            (), {"block_size": str(max(sizes, default=0)), "num_gpu_blocks": str(total)}
        )
        yield info

    def _renamed(self, alias: str, family: Metric) -> Metric:
        renamed = Metric(f"vllm:{alias}", family.documentation, family.type)
        for sample in family.samples:
            labels = dict(sample.labels)
            if "outcome" in labels:
                labels = {"finished_reason": labels["outcome"]}
            suffix = sample.name.removeprefix(family.name)
            renamed.add_sample(f"vllm:{alias}{suffix}", labels | self._labels, sample.value)
        return renamed

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", "", labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family

    def _counter(self, name: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", "", labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _blocks_by_state(worker: WorkerView) -> tuple[tuple[str, int], ...]:
    load = worker.load
    return (
        ("free", load.free_blocks),
        ("cached", load.cached_blocks),
        ("leased", load.leased_blocks),
    )


def _decode_blocks(status: FleetView) -> tuple[int, int]:
    """Return (leased, all) blocks of the decode pools."""
    decode = [worker for worker in status.workers if worker.role is Role.DECODE]
    leased = sum(worker.load.leased_blocks for worker in decode)
    return leased, sum(w.capacity.num_blocks for w in decode if w.capacity is not None)
