"""What the server counts, and how Prometheus reads it.

Own names are the truth. The same numbers also go by the names of another server, because dashboards
and the endpoint pickers of gateways are written for those. Every label has a bounded set of values:
nothing that a client sends becomes one. Knows no HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

TTFT_BUCKETS: Final = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
ITL_BUCKETS: Final = (
    .001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5,
)  # fmt: skip
SECONDS_BUCKETS: Final = (.05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)  # fmt: skip
TOKEN_BUCKETS: Final = tuple(float(2**power) for power in range(18))

OUTCOMES: Final = frozenset(
    "stop length client_gone stopped stalled drain deadline_exceeded no_worker overloaded draining "
    "context_length_exceeded server_error".split()
)
"""Anything else is counted as `other`."""


class Metrics:
    """The counters of this process.

    Args:
      model_name: label of the alias names.
      compat: `vllm` for alias names, `none` for own names only.
    """

    def __init__(self, model_name: str, compat: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._model_name = model_name
        self._compat = compat
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._requests = self._counter("requests", "Sequences by how they ended", ("outcome",))
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens in prompts")
        self._cached_tokens = self._counter(
            "cached_prompt_tokens", "Prompt tokens whose KV was there already"
        )
        self._completion_tokens = self._counter("completion_tokens", "Tokens generated")
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token", TTFT_BUCKETS
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Between tokens of one sequence", ITL_BUCKETS
        )
        self._e2e = self._histogram(
            "request_duration_seconds", "From submission to the end", SECONDS_BUCKETS
        )
        self._queue = self._histogram(
            "queue_seconds", "From submission to dispatch", SECONDS_BUCKETS
        )
        self._prompt_sizes = self._histogram("request_prompt_tokens", "By prompt", TOKEN_BUCKETS)
        self._completion_sizes = self._histogram(
            "request_completion_tokens", "By completion", TOKEN_BUCKETS
        )

    def watch(
        self,
        status: Callable[[], FleetView],
        in_flight: Callable[[], int],
        connections: Callable[[], int],
    ) -> None:
        """Read these whenever the metrics are."""
        self._registry.register(FleetCollector(status, in_flight, connections))
        if self._compat == "vllm":
            self._registry.register(AliasCollector(self._aliases, status, self._model_name))

    def exposition(self) -> bytes:
        """Return everything in Prometheus's text form."""
        return generate_latest(self._registry)

    def first_token(self, seconds: float) -> None:
        """A sequence has got its first token."""
        self._ttft.observe(seconds)

    def next_tokens(self, count: int, seconds: float) -> None:
        """`count` more tokens came together after a pause; the pause counts for each of them."""
        for _ in range(count):
            self._itl.observe(seconds / count)

    def refused(self, code: str) -> None:
        """A request was refused before anything ran."""
        self._requests.labels(code if code in OUTCOMES else "other").inc()

    def ended(
        self,
        outcome: str,
        *,
        elapsed_s: float,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int,
        queue_s: float | None,
    ) -> None:
        """A sequence has ended, in whatever way."""
        self._requests.labels(outcome if outcome in OUTCOMES else "other").inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)
        self._completion_tokens.inc(completion_tokens)
        self._e2e.observe(elapsed_s)
        self._prompt_sizes.observe(prompt_tokens)
        self._completion_sizes.observe(completion_tokens)
        if queue_s is not None:
            self._queue.observe(queue_s)

    def _aliases(self) -> Iterator[tuple[str, Metric]]:
        own: tuple[tuple[str, Counter | Histogram], ...] = (
            ("time_to_first_token_seconds", self._ttft),
            ("inter_token_latency_seconds", self._itl),
            ("e2e_request_latency_seconds", self._e2e),
            ("request_queue_time_seconds", self._queue),
            ("request_prompt_tokens", self._prompt_sizes),
            ("request_generation_tokens", self._completion_sizes),
            ("prompt_tokens", self._prompt_tokens),
            ("generation_tokens", self._completion_tokens),
            ("prefix_cache_queries", self._prompt_tokens),
            ("prefix_cache_hits", self._cached_tokens),
            ("request_success", self._requests),
        )
        for alias, metric in own:
            for family in metric.collect():
                yield alias, family

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"triolet_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"triolet_{name}", text, buckets=buckets, registry=self._registry)


class FleetCollector(Collector):
    """What the fleet and the surface look like at the moment of the scrape."""

    def __init__(
        self,
        status: Callable[[], FleetView],
        in_flight: Callable[[], int],
        connections: Callable[[], int],
    ) -> None:
        self._status = status
        self._in_flight = in_flight
        self._connections = connections

    def collect(self) -> Iterable[Metric]:
        """Yield one family after the other."""
        status = self._status()
        yield _gauge("triolet_requests_queued", "Requests that wait for a worker", status.queued)
        yield _gauge("triolet_requests_running", "Requests that workers serve", status.running)
        yield _gauge("triolet_requests_in_flight", "Sequences not ended", self._in_flight())
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
        for worker in status.workers:
            for state, count in _blocks_by_state(worker):
                blocks.add_metric((worker.role.value, worker.name, state), count)
            family = received if worker.role is Role.DECODE else sent
            family.add_metric((worker.name,), worker.load.kv_bytes)
        yield from (blocks, received, sent)

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
            up.add_metric(labels, float(worker.is_live))
            for name, family in counters.items():
                family.add_metric(labels, getattr(worker.load, name))
        yield up
        yield from counters.values()


class AliasCollector(Collector):
    """The same numbers under the names that vLLM's dashboards and endpoint pickers read."""

    def __init__(
        self,
        families: Callable[[], Iterator[tuple[str, Metric]]],
        status: Callable[[], FleetView],
        model_name: str,
    ) -> None:
        self._families = families
        self._status = status
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterable[Metric]:
        """Yield one family after the other."""
        for alias, family in self._families():
            yield self._renamed(alias, family)
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
