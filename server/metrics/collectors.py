"""What is read at the moment of a scrape: queue, workers, pools and caches.

Hits of prefix caches: on prefill, prompt tokens that are not computed again; on decode, prompt
tokens with KV that is not sent again.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from triolet.config import ResponseCacheConfig
from triolet.ids import Role

from ..cache.store import ResponseStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ..scheduling.status import FleetStatus, WorkerStatus
    from ..text.turns import Turns


Kind: TypeAlias = type[CounterMetricFamily] | type[GaugeMetricFamily]
Labels: TypeAlias = tuple[str, ...]
Rows: TypeAlias = tuple[tuple[Kind, str, str, "Callable[[WorkerStatus], float]"], ...]
"""Families with one sample for each worker: kind, name, text, value."""

COUNTER, GAUGE = CounterMetricFamily, GaugeMetricFamily
WORKER: Final = ("role", "worker")
POOL: Final = ("pool", "worker")

OF_ALL_WORKERS: Final[Rows] = (
    (GAUGE, "worker_up", "1 for a worker that is live", lambda one: one.state == "alive"),
    (
        GAUGE,
        "worker_breaker_open",
        "1 for a worker that failed too often and is left out, or tried",
        lambda one: one.breaker != "closed",
    ),
    (
        GAUGE,
        "worker_step_seconds",
        "What a step takes, decode's without prompt tokens",
        attrgetter("load.step_s"),
    ),
    (
        GAUGE,
        "worker_prompt_tokens_per_second",
        "Prompt tokens computed",
        attrgetter("load.prompt_tokens_per_s"),
    ),
    (
        GAUGE,
        "worker_waiting_prompt_tokens",
        "Prompt tokens that wait for KV",
        attrgetter("load.waiting_tokens"),
    ),
    (
        COUNTER,
        "worker_busy_seconds",
        "Time that the device was in steps",
        attrgetter("load.busy_s"),
    ),
    (
        COUNTER,
        "worker_busy_row_seconds",
        "The same, each step times its rows",
        attrgetter("load.busy_row_s"),
    ),
    *(
        (COUNTER, f"worker_{name}", text, attrgetter(f"load.{name}"))
        for name, text in (
            ("steps", "Device steps"),
            ("computed_tokens", "Tokens computed"),
            ("stale_frames", "Frames dropped because they named no live lease"),
            ("bad_digests", "KV chunks with a wrong digest"),
            ("preemptions", "Sequences that lost their blocks to others"),
            ("local_prompts", "Prompts that decode computed itself"),
            ("borrowed_steps", "Device steps that used cores that other workers could spare"),
        )
    ),
)
OF_NAMED_WORKERS: Final[Rows] = (
    *(
        (COUNTER, f"prefix_cache_{name}", text, attrgetter(f"load.cache.{name}"))
        for name, text in (
            ("queried_tokens", "Prompt tokens that were looked up"),
            ("hit_tokens", "Prompt tokens with KV in the cache"),
            ("evicted_blocks", "Cached blocks that gave way to others"),
            ("spilled_blocks", "Cached blocks that went to host memory"),
            ("restored_blocks", "Blocks that came back from host memory"),
        )
    ),
    (
        GAUGE,
        "prefix_cache_host_bytes",
        "Host memory that evicted blocks occupy",
        attrgetter("load.cache.host_bytes"),
    ),
    (
        GAUGE,
        "prefix_cache_tenants",
        "Tenants that have cached blocks",
        attrgetter("load.cache.tenants"),
    ),
    (
        COUNTER,
        "kv_bytes_shared",
        "KV shipped or received through shared memory, not a socket",
        attrgetter("load.kv_shared_bytes"),
    ),
)
OF_POOLS: Final[Rows] = (
    (
        GAUGE,
        "kv_block_tokens",
        "Tokens that one KV block holds",
        attrgetter("capacity.block_size"),
    ),
    (
        GAUGE,
        "kv_block_bytes",
        "Bytes of one KV block",
        attrgetter("capacity.bytes_per_block"),
    ),
)
OF_PREFILL: Final[Rows] = (
    (COUNTER, "kv_bytes_sent", "KV shipped by prefill", attrgetter("load.kv_bytes")),
)
OF_DECODE: Final[Rows] = (
    (COUNTER, "kv_bytes_received", "KV written into decode pools", attrgetter("load.kv_bytes")),
)
SPECULATION: Final[Rows] = tuple(
    (COUNTER, f"speculative_{name}", text, attrgetter(f"load.speculative_{name}"))
    for name, text in (
        ("rows", "Rows of decode that carried guesses of coming tokens"),
        ("proposed", "Guesses that they carried"),
        ("accepted", "Guesses that were the token that was chosen"),
    )
)
SEQUENCE_STATES: Final = ("running", "paused", "waiting")
BLOCK_STATES: Final = ("free", "cached", "leased")


def family(
    kind: Kind,
    name: str,
    text: str,
    labels: Labels = (),
    samples: Iterable[tuple[Labels, float]] = (),
) -> Metric:
    """Return a family with a value for each tuple of its labels' values."""
    metric = kind(f"triolet_{name}", text, labels=labels)
    for values, value in samples:
        metric.add_metric(values, float(value))
    return metric


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a family of one sample without labels."""
    return family(GAUGE, name, text, (), [((), value)])


def counts(name: str, text: str, label: str, values: Mapping[Any, int]) -> Metric:
    """Return counters by the values of one label."""
    return family(
        COUNTER, name, text, (label,), (((str(word),), value) for word, value in values.items())
    )


def by_model(
    families: Mapping[str, Iterable[Metric]], label: str | None = "model"
) -> Iterable[Metric]:
    """Return each family once, with the samples of all models.

    Args:
      families: of each model by its name.
      label: what the name is in each sample; None where the samples tell their models apart.
    """
    merged: dict[str, Metric] = {}
    for model, of_model in families.items():
        for one in of_model:
            whole = merged.get(one.name)
            if whole is None:
                whole = merged[one.name] = Metric(one.name, one.documentation, one.type)
            for sample in one.samples:
                labels = sample.labels if label is None else {label: model, **sample.labels}
                whole.add_sample(sample.name, labels, sample.value)
    return merged.values()


def surface_families(
    connections: int, writes: Mapping[str, int], turned_away: Mapping[str, int]
) -> Iterator[Metric]:
    """Yield what the surface looks like."""
    yield gauge("connections", "Open client connections", connections)
    yield counts(
        "connections_turned_away",
        "Connections refused (server or address: by its bound) and idle ones closed (evicted)",
        "why",
        turned_away,
    )
    yield counts("client_writes", "Writes to clients by their way", "way", writes)


def usage_families(dropped: int) -> Iterator[Metric]:
    """Yield how the usage ledger is; 0 where it is not kept."""
    text = "Records of ended requests that the usage ledger could not keep"
    yield family(COUNTER, "usage_records_dropped", text, (), [((), dropped)])


def fleet_families(status: FleetStatus) -> Iterator[Metric]:
    """Yield what the workers of one model and its queue look like."""
    yield gauge("requests_queued", "Requests that wait for a worker", status.queued)
    yield family(
        GAUGE,
        "class_requests_queued",
        "Requests that wait, by service class",
        ("class",),
        (((name,), count) for name, count in status.queued_by_class.items()),
    )
    yield gauge(
        "queue_lag_tokens",
        "By how many tokens of weight 1 the tenants that wait are apart in one class",
        status.queue_lag_tokens,
    )
    yield gauge("requests_running", "Requests that workers serve", status.running)
    yield gauge("retries_left", "Retries that can be paid for", status.retries_left)
    yield gauge("quarantined_prompts", "Prompts and grammars refused", status.quarantined)
    yield from _overload(status)
    yield from _workers(status.workers)


def _overload(status: FleetStatus) -> Iterator[Metric]:
    overload = status.overload
    for name, text, value in (
        ("brownout_level", "What is given up, from 0 for nothing to 4", overload.brownout),
        ("overload_pressure", "Wait of the default class, of what it may wait", overload.pressure),
        ("owed_tokens", "Prompt tokens without a first token yet", overload.owed_tokens),
        ("promised_returns", "Refused clients that are expected back", overload.expected_returns),
        ("ttft_error_seconds", "Mean error of predicted first tokens", overload.error_s),
        ("guard_limit_tokens", "Most tokens that may be owed", overload.guard_tokens),
        ("line_tokens_per_second", "At which the queue moves", overload.tokens_per_s),
    ):
        # Where there is no such number there is no sample.
        if value is not None:
            yield gauge(name, text, value)


def _workers(workers: Iterable[WorkerStatus]) -> Iterator[Metric]:
    workers = list(workers)
    # A worker that has not named itself yet: its address would become a label for ever.
    named = [worker for worker in workers if worker.capacity is not None]
    decode = [worker for worker in workers if worker.role is Role.DECODE]
    yield from _by_worker(OF_ALL_WORKERS, WORKER, workers)
    yield from _by_worker(OF_NAMED_WORKERS, WORKER, named)
    yield from _by_worker(OF_POOLS, POOL, named)
    yield from _by_worker(OF_PREFILL, ("worker",), [w for w in named if w.role is Role.PREFILL])
    yield from _by_worker(OF_DECODE, ("worker",), [w for w in named if w.role is Role.DECODE])
    yield from _by_worker(SPECULATION, ("worker",), decode)
    yield family(
        COUNTER,
        "worker_frames_dropped",
        "Frames that a worker did not act upon",
        (*WORKER, "reason"),
        (
            ((worker.role.value, worker.name, reason), count)
            for worker in workers
            for reason, count in worker.load.dropped.items()
        ),
    )
    yield family(
        GAUGE,
        "worker_sequences",
        "Sequences that a worker holds, by what they do",
        (*WORKER, "state"),
        (
            ((worker.role.value, worker.name, state), getattr(worker.load, state))
            for worker in workers
            for state in SEQUENCE_STATES
        ),
    )
    yield family(
        GAUGE,
        "kv_blocks",
        "KV blocks by pool and state",
        (*POOL, "state"),
        (
            ((worker.role.value, worker.name, state), getattr(worker.load, f"{state}_blocks"))
            for worker in named
            for state in BLOCK_STATES
        ),
    )


def _by_worker(rows: Rows, labels: Labels, workers: Iterable[WorkerStatus]) -> Iterator[Metric]:
    """Yield the families of a table.

    Args:
      rows: of the table.
      labels: role (or pool) and name of a worker, or its name alone.
      workers: that have a sample in each.
    """
    for kind, name, text, value in rows:
        samples = (((one.role.value, one.name)[-len(labels) :], value(one)) for one in workers)
        yield family(kind, name, text, labels, samples)


def door_families(
    turns: Turns[Any],
    held_bytes: Callable[[], int],
    refused_bodies: Mapping[Any, int],
) -> Iterator[Metric]:
    """Yield the lines before the text processes, and the bytes of bodies."""
    yield family(
        GAUGE,
        "line_jobs",
        "Jobs of text processes",
        ("state",),
        ((("waiting",), turns.num_waiting), (("running",), turns.num_running)),
    )
    yield counts("line_refusals", "Jobs that found a line full", "reason", turns.refused)
    yield gauge("body_bytes", "Room that bodies under way take", held_bytes())
    yield counts("body_refusals", "Bodies for which there was no room", "reason", refused_bodies)


def kept_families(kept: Mapping[str, ResponseStore]) -> Iterator[Metric]:
    """Yield what is kept of answers to be given again, and of responses to go on from; zeros where
    nothing is."""
    nothing = ResponseStore(ResponseCacheConfig())
    for name in ("response_cache", "response_store"):
        store = kept.get(name, nothing)
        if len(store):
            store.expire(trio.current_time())
        yield counts(f"{name}_gone", "Kept answers that are gone, by why", "why", store.gone)
        yield gauge(f"{name}_answers", "Answers that are kept", len(store))
        yield gauge(f"{name}_bytes", "Memory that kept answers take", store.used_bytes)
    yield counts(
        "response_cache_requests",
        "Requests that asked for the response cache, by what came of it",
        "outcome",
        kept.get("response_cache", nothing).outcomes,
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


def alias_families(
    own_family: Callable[[str], Metric],
    status: FleetStatus,
    model_name: str,
    *,
    is_only: bool = True,
) -> Iterator[Metric]:
    """Yield the same numbers under the names that vLLM's dashboards and endpoint pickers read.

    Args:
      own_family: returns a family by its own name, without the prefix.
      status: of the model's workers.
      model_name: label of all.
      is_only: whether no other model is served; the family that vLLM has no such label for gets it
        otherwise.
    """
    labels = {"model_name": model_name, "engine": "0"}
    for alias, name in ALIASES.items():
        yield _renamed(f"vllm:{alias}", own_family(name), labels)
    decode = [worker for worker in status.workers if worker.role is Role.DECODE]
    leased = sum(worker.load.leased_blocks for worker in decode)
    total = sum(worker.capacity.num_blocks for worker in decode if worker.capacity is not None)
    preemptions = sum(worker.load.preemptions for worker in status.workers)
    for kind, name, value in (
        (GAUGE, "num_requests_waiting", status.queued),
        (GAUGE, "num_requests_running", status.running),
        *((GAUGE, name, leased / total if total else 0.0) for name in CACHE_USAGE),
        (COUNTER, "num_preemptions", preemptions),
    ):
        metric = kind(f"vllm:{name}", "", labels=tuple(labels))
        metric.add_metric(tuple(labels.values()), value)
        yield metric
    sizes = {w.capacity.block_size for w in status.workers if w.capacity is not None}
    info = {"block_size": str(max(sizes, default=0)), "num_gpu_blocks": str(total)}
    info |= {} if is_only else {"model_name": model_name}
    yield InfoMetricFamily("vllm:cache_config", "", value=info)


def _renamed(alias: str, metric: Metric, labels: dict[str, str]) -> Metric:
    renamed = Metric(alias, metric.documentation, metric.type)
    for sample in metric.samples:
        own = dict(sample.labels)
        if "outcome" in own:
            own = {"finished_reason": own["outcome"]}
        suffix = sample.name.removeprefix(metric.name)
        renamed.add_sample(f"{alias}{suffix}", own | labels, sample.value)
    return renamed
