"""What is read at the moment of a scrape: queue, workers, pools and caches.

Of prefix caches: on prefill a hit is prompt tokens that are not computed again, on decode such
whose KV does not travel.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from triolet.config import ResponseCacheConfig
from triolet.ids import Role

from ..cache.store import ResponseStore
from ..contract.generation import CacheOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ..cache.front import CachingFleet
    from ..scheduling.status import FleetStatus, WorkerStatus


LABELS: Final = ("role", "worker")
COUNTS: Final = {
    "queried_tokens": "Prompt tokens that were looked up",
    "hit_tokens": "Prompt tokens with KV in the cache",
    "evicted_blocks": "Cached blocks that gave way to others",
    "spilled_blocks": "Cached blocks that went to host memory",
    "restored_blocks": "Blocks that came back from host memory",
}


def cache_families(status: FleetStatus) -> Iterator[Metric]:
    """Yield one family after the other."""
    counters = {
        name: CounterMetricFamily(f"triolet_prefix_cache_{name}", text, labels=LABELS)
        for name, text in COUNTS.items()
    }
    host_bytes = GaugeMetricFamily(
        "triolet_prefix_cache_host_bytes", "Host memory that evicted blocks occupy", labels=LABELS
    )
    tenants = GaugeMetricFamily(
        "triolet_prefix_cache_tenants", "Tenants that have cached blocks", labels=LABELS
    )
    for worker in status.workers:
        if worker.capacity is None:
            continue  # it has not named itself
        labels = (worker.role.value, worker.name)
        for name, family in counters.items():
            family.add_metric(labels, getattr(worker.load.cache, name))
        host_bytes.add_metric(labels, worker.load.cache.host_bytes)
        tenants.add_metric(labels, worker.load.cache.tenants)
    yield from counters.values()
    yield host_bytes
    yield tenants


def queue_families(status: FleetStatus) -> Iterator[Metric]:
    """Yield what a look at the queue shows."""
    waiting = GaugeMetricFamily(
        "triolet_class_requests_queued", "Requests that wait, by service class", labels=("class",)
    )
    for name, count in status.queued_by_class.items():
        waiting.add_metric((name,), count)
    yield waiting
    yield GaugeMetricFamily(
        "triolet_queue_lag_tokens",
        "By how many tokens of weight 1 the tenants that wait are apart in one class",
        value=status.queue_lag_tokens,
    )


class ResponseCacheCollector(Collector):
    """Answers that were given again, and what they take; zeros where none are kept."""

    def __init__(self) -> None:
        self._cache: CachingFleet | None = None

    def watch(self, cache: CachingFleet) -> None:
        """Show what comes of this from now on."""
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """Yield one family after the other."""
        store = ResponseStore(ResponseCacheConfig())
        outcomes = Counter(dict.fromkeys(CacheOutcome, 0))
        if self._cache is not None:
            store, outcomes = self._cache.store, self._cache.outcomes
            store.expire(trio.current_time())
        requests = CounterMetricFamily(
            "triolet_response_cache_requests",
            "Requests that asked for the response cache, by what came of it",
            labels=("outcome",),
        )
        for outcome, count in outcomes.items():
            requests.add_metric((outcome.value,), count)
        yield requests
        gone = CounterMetricFamily(
            "triolet_response_cache_gone", "Kept answers that are gone, by why", labels=("why",)
        )
        for why, count in store.gone.items():
            gone.add_metric((why,), count)
        yield gone
        yield GaugeMetricFamily(
            "triolet_response_cache_answers", "Answers that are kept", value=len(store)
        )
        yield GaugeMetricFamily(
            "triolet_response_cache_bytes", "Memory that kept answers take", value=store.used_bytes
        )


ALIASES: Final = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "request_time_per_output_token_seconds": "request_token_seconds",
    "e2e_request_latency_seconds": "request_seconds",
    "request_queue_time_seconds": "queue_seconds",
    "request_prefill_time_seconds": "prefill_seconds",
    "request_decode_time_seconds": "decode_seconds",
    "request_inference_time_seconds": "inference_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_completion_tokens",
    "request_max_num_generation_tokens": "request_longest_completion_tokens",
    "request_params_max_tokens": "request_max_tokens",
    "request_params_n": "request_choices",
    "iteration_tokens_total": "step_tokens",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "completion_tokens",
    "prefix_cache_queries": "prompt_tokens",
    "prefix_cache_hits": "cached_prompt_tokens",
    "request_success": "requests",
}
"""vLLM's name, and ours for the same number."""
CACHE_USAGE: Final = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
"""The present name and that of older boards."""


class FleetCollector(Collector):
    """What the fleet and the surface look like at the moment of the scrape."""

    def __init__(
        self,
        status: Callable[[], FleetStatus],
        connections: Callable[[], int],
        writes: Callable[[], Mapping[str, int]],
        turned_away: Callable[[], Mapping[str, int]],
    ) -> None:
        self._turned_away = turned_away
        self._status = status
        self._connections = connections
        self._writes = writes

    def collect(self) -> Iterable[Metric]:
        """Yield one family after the other."""
        status = self._status()
        yield _gauge("triolet_requests_queued", "Requests that wait for a worker", status.queued)
        yield from queue_families(status)
        yield _gauge("triolet_requests_running", "Requests that workers serve", status.running)
        yield _gauge("triolet_connections", "Open client connections", self._connections())
        turned_away = CounterMetricFamily(
            "triolet_connections_turned_away",
            "Connections refused (server or address: by its bound) and idle ones closed (evicted)",
            labels=("why",),
        )
        for why, count in self._turned_away().items():
            turned_away.add_metric((why,), count)
        yield turned_away
        writes = CounterMetricFamily(
            "triolet_client_writes", "Writes to clients by their way", labels=("way",)
        )
        for way, count in self._writes().items():
            writes.add_metric((way,), count)
        yield writes
        yield _gauge("triolet_retries_left", "Retries that can be paid for", status.retries_left)
        yield _gauge(
            "triolet_quarantined_prompts", "Prompts and grammars refused", status.quarantined
        )
        yield from _overload(status)
        yield from self._pools(status)
        yield from self._workers(status)
        yield from _speculation(status)
        yield from cache_families(status)

    def _pools(self, status: FleetStatus) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "triolet_kv_blocks", "KV blocks by pool and state", labels=("pool", "worker", "state")
        )
        received = CounterMetricFamily(
            "triolet_kv_bytes_received", "KV written into decode pools", labels=("worker",)
        )
        sent = CounterMetricFamily(
            "triolet_kv_bytes_sent", "KV shipped by prefill", labels=("worker",)
        )
        shared = CounterMetricFamily(
            "triolet_kv_bytes_shared",
            "KV shipped or received through shared memory, not a socket",
            labels=("role", "worker"),
        )
        block_tokens = GaugeMetricFamily(
            "triolet_kv_block_tokens", "Tokens that one KV block holds", labels=("pool", "worker")
        )
        block_bytes = GaugeMetricFamily(
            "triolet_kv_block_bytes", "Bytes of one KV block", labels=("pool", "worker")
        )
        for worker in status.workers:
            if worker.capacity is None:
                continue  # it has not named itself: its address would become a label for ever
            pool = (worker.role.value, worker.name)
            block_tokens.add_metric(pool, worker.capacity.block_size)
            block_bytes.add_metric(pool, worker.capacity.bytes_per_block)
            for state, count in _blocks_by_state(worker):
                blocks.add_metric((*pool, state), count)
            family = received if worker.role is Role.DECODE else sent
            family.add_metric((worker.name,), worker.load.kv_bytes)
            shared.add_metric((worker.role.value, worker.name), worker.load.kv_shared_bytes)
        yield from (blocks, received, sent, shared, block_tokens, block_bytes)

    def _workers(self, status: FleetStatus) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "triolet_worker_up", "1 for a worker that is live", labels=("role", "worker")
        )
        sequences = GaugeMetricFamily(
            "triolet_worker_sequences",
            "Sequences that a worker holds, by what they do",
            labels=("role", "worker", "state"),
        )
        breaker_open = GaugeMetricFamily(
            "triolet_worker_breaker_open",
            "1 for a worker that failed too often and is left out, or tried",
            labels=("role", "worker"),
        )
        dropped = CounterMetricFamily(
            "triolet_worker_frames_dropped",
            "Frames that a worker did not act upon",
            labels=("role", "worker", "reason"),
        )
        counters = {
            name: CounterMetricFamily(f"triolet_worker_{name}", text, labels=("role", "worker"))
            for name, text in (
                ("steps", "Device steps"),
                ("computed_tokens", "Tokens computed"),
                ("stale_frames", "Frames dropped because they named no live lease"),
                ("bad_digests", "KV chunks with a wrong digest"),
                ("preemptions", "Sequences that lost their blocks to others"),
                ("local_prompts", "Prompts that decode computed itself"),
                ("borrowed_steps", "Device steps that used cores that other workers could spare"),
            )
        }
        gauges = {
            field: GaugeMetricFamily(f"triolet_worker_{name}", text, labels=("role", "worker"))
            for field, name, text in (
                ("step_s", "step_seconds", "What a step takes, decode's without prompt tokens"),
                ("prompt_tokens_per_s", "prompt_tokens_per_second", "Prompt tokens computed"),
                ("waiting_tokens", "waiting_prompt_tokens", "Prompt tokens that wait for KV"),
            )
        }
        for worker in status.workers:
            labels = (worker.role.value, worker.name)
            up.add_metric(labels, float(worker.state == "alive"))
            breaker_open.add_metric(labels, float(worker.breaker != "closed"))
            for reason, count in worker.load.dropped.items():
                dropped.add_metric((*labels, reason), count)
            for state in ("running", "paused", "waiting"):
                sequences.add_metric((*labels, state), getattr(worker.load, state))
            for name, counter in counters.items():
                counter.add_metric(labels, getattr(worker.load, name))
            for name, gauge in gauges.items():
                gauge.add_metric(labels, getattr(worker.load, name))
        yield from (up, sequences, breaker_open, dropped)
        yield from counters.values()
        yield from gauges.values()


class AliasCollector(Collector):
    """The same numbers under the names that vLLM's dashboards and endpoint pickers read."""

    def __init__(
        self,
        family: Callable[[str], Metric],
        status: Callable[[], FleetStatus],
        model_name: str,
    ) -> None:
        self._family = family
        self._status = status
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterable[Metric]:
        """Yield one family after the other."""
        for alias, name in ALIASES.items():
            yield self._renamed(alias, self._family(name))
        status = self._status()
        used, total = _decode_blocks(status)
        yield self._gauge("num_requests_waiting", status.queued)
        yield self._gauge("num_requests_running", status.running)
        for name in CACHE_USAGE:
            yield self._gauge(name, used / total if total else 0.0)
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


def _overload(status: FleetStatus) -> Iterator[Metric]:
    overload = status.overload
    for name, text, value in (
        ("brownout_level", "What is given up, from 0 for nothing to 4", overload.brownout),
        ("overload_pressure", "Wait of the default class, of what it may wait", overload.pressure),
        ("owed_tokens", "Prompt tokens without a first token yet", overload.owed_tokens),
        ("promised_returns", "Refused clients that are expected back", overload.expected_returns),
        ("ttft_error_seconds", "Mean error of predicted first tokens", overload.error_s),
    ):
        yield _gauge(f"triolet_{name}", text, value)
    # Where there is no such number there is no sample.
    for name, text, maybe in (
        ("guard_limit_tokens", "Most tokens that may be owed", overload.guard_tokens),
        ("line_tokens_per_second", "At which the queue moves", overload.tokens_per_s),
    ):
        if maybe is not None:
            yield _gauge(f"triolet_{name}", text, maybe)


def _speculation(status: FleetStatus) -> Iterator[Metric]:
    families = {
        name: CounterMetricFamily(f"triolet_speculative_{name}", text, labels=("worker",))
        for name, text in (
            ("rows", "Rows of decode that carried guesses of coming tokens"),
            ("proposed", "Guesses that they carried"),
            ("accepted", "Guesses that were the token that was chosen"),
        )
    }
    for worker in status.workers:
        if worker.role is Role.DECODE:
            for name, family in families.items():
                family.add_metric((worker.name,), getattr(worker.load, f"speculative_{name}"))
    yield from families.values()


def _blocks_by_state(worker: WorkerStatus) -> tuple[tuple[str, int], ...]:
    load = worker.load
    return (
        ("free", load.free_blocks),
        ("cached", load.cached_blocks),
        ("leased", load.leased_blocks),
    )


def _decode_blocks(status: FleetStatus) -> tuple[int, int]:
    """Return (leased, all) blocks of the decode pools."""
    decode = [worker for worker in status.workers if worker.role is Role.DECODE]
    leased = sum(worker.load.leased_blocks for worker in decode)
    return leased, sum(w.capacity.num_blocks for w in decode if w.capacity is not None)
