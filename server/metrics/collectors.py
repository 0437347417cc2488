"""Metrics that are read at scrape time: queue, workers, KV pools and caches; and aliases under
vLLM's names.

A prefix cache hit counts prompt tokens: on prefill those that are not computed again, on decode
those with KV that is not sent again.
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
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from triolet.ids import Place
    from triolet.store_health import StoreHealth

    from ..scheduling.status import FleetStatus, WorkerStatus
    from ..slo.meter import ObjectiveCounter
    from ..text.turns import Turns


Kind: TypeAlias = type[CounterMetricFamily] | type[GaugeMetricFamily]
Labels: TypeAlias = tuple[str, ...]
Rows: TypeAlias = tuple[tuple[Kind, str, str, "Callable[[WorkerStatus], float]"], ...]
"""Metric families with one sample per worker: kind, name, help text, value."""

COUNTER, GAUGE = CounterMetricFamily, GaugeMetricFamily
WORKER: Final = ("role", "worker")
POOL: Final = ("pool", "worker")

OF_ALL_WORKERS: Final[Rows] = (
    (GAUGE, "worker_up", "1 while a worker is alive", lambda one: one.state == "alive"),
    (
        GAUGE,
        "worker_breaker_open",
        "1 while a worker is left out or being tried after too many failures",
        lambda one: one.breaker != "closed",
    ),
    (
        GAUGE,
        "worker_step_seconds",
        "Duration of a step; on decode, of one without prompt tokens",
        attrgetter("load.step_s"),
    ),
    (
        GAUGE,
        "worker_prompt_tokens_per_second",
        "Prompt tokens computed per second",
        attrgetter("load.prompt_tokens_per_s"),
    ),
    (
        GAUGE,
        "worker_waiting_prompt_tokens",
        "Prompt tokens that wait to be computed, or on decode for KV",
        attrgetter("load.waiting_tokens"),
    ),
    (
        COUNTER,
        "worker_busy_seconds",
        "Time that the device spent in steps",
        attrgetter("load.busy_s"),
    ),
    (
        COUNTER,
        "worker_busy_row_seconds",
        "Time that the device spent in steps, times their rows",
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
            ("borrowed_steps", "Device steps that used idle cores of other workers"),
        )
    ),
)
OF_NAMED_WORKERS: Final[Rows] = (
    *(
        (COUNTER, f"prefix_cache_{name}", text, attrgetter(f"load.cache.{name}"))
        for name, text in (
            ("queried_tokens", "Prompt tokens looked up in the prefix cache"),
            ("hit_tokens", "Prompt tokens found in the prefix cache"),
            ("evicted_blocks", "Blocks evicted from the prefix cache"),
            ("spilled_blocks", "Evicted blocks moved to host memory"),
            ("restored_blocks", "Blocks restored from host memory"),
        )
    ),
    (
        GAUGE,
        "prefix_cache_host_bytes",
        "Host memory used by evicted blocks",
        attrgetter("load.cache.host_bytes"),
    ),
    (
        GAUGE,
        "prefix_cache_tenants",
        "Tenants with cached blocks",
        attrgetter("load.cache.tenants"),
    ),
    (
        COUNTER,
        "kv_bytes_shared",
        "KV shipped or received through shared memory",
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
        ("rows", "Decode rows that carried speculative tokens"),
        ("proposed", "Speculative tokens proposed"),
        ("accepted", "Speculative tokens accepted"),
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
    """Return a family with one sample per tuple of label values."""
    metric = kind(f"triolet_{name}", text, labels=labels)
    for values, value in samples:
        metric.add_metric(values, float(value))
    return metric


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a gauge with one sample and no labels."""
    return family(GAUGE, name, text, (), [((), value)])


def counts(name: str, text: str, label: str, values: Mapping[Any, int]) -> Metric:
    """Return a counter family by the values of one label."""
    return family(
        COUNTER, name, text, (label,), (((str(word),), value) for word, value in values.items())
    )


def by_model(
    families: Mapping[str, Iterable[Metric]], label: str | None = "model"
) -> Iterable[Metric]:
    """Merge the families of several models, each with all samples.

    Args:
      families: each model's families, by its name.
      label: label to add with the model's name; None if samples already identify their models.
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
    """Yield metrics of client connections."""
    yield gauge("connections", "Open client connections", connections)
    yield counts(
        "connections_turned_away",
        "Connections refused (by the limit: server or address) and idle ones closed (evicted)",
        "why",
        turned_away,
    )
    yield counts("client_writes", "Writes to clients by code path", "way", writes)


def usage_families(dropped: int) -> Iterator[Metric]:
    """Yield metrics of the usage ledger; 0 if there is none."""
    text = "Records of ended requests that the usage ledger dropped"
    yield family(COUNTER, "usage_records_dropped", text, (), [((), dropped)])


def slo_families(counters: Sequence[ObjectiveCounter]) -> list[Metric]:
    """Return the events of all objectives, read at one moment: if good and total were read at
    different times, their ratio would be wrong."""
    found = []
    for which, text in ((1, "events"), (0, "good")):
        help_of = "Events that an objective counts" if which else "Good events of an objective"
        series = [
            ((one.objective.name, *labels), float(counts[which]))
            for one in counters
            for labels, counts in one.series.items()
        ]
        tenants = [
            ((one.objective.name, tenant), float(counts[which]))
            for one in counters
            for tenant, counts in one.tenants.items()
        ]
        labels = ("slo", "model", "version", "class", "zone")
        found.append(family(COUNTER, f"slo_{text}", help_of, labels, series))
        tenant_labels = ("slo", "tenant")
        found.append(family(COUNTER, f"slo_tenant_{text}", help_of, tenant_labels, tenants))
    return found


def membership_families(health: StoreHealth | None) -> Iterator[Metric]:
    """Yield metrics of the store of members; without samples if no store is configured."""
    text = "Time since DNS or Redis last named workers"
    ages = [] if health is None else [((), trio.current_time() - health.answered_at)]
    yield family(GAUGE, "membership_age_seconds", text, (), ages)


def scale_families(places: Mapping[Place, tuple[int | None, int | None]]) -> Iterator[Metric]:
    """Yield desired and observed numbers of processes.

    Args:
      places: desired and observed number by place; None if unknown.
    """
    for at, (name, text) in enumerate(
        (
            ("desired_workers", "Number of processes set by `triolet scale`"),
            ("observed_workers", "Live workers"),
        )
    ):
        known = (
            (place, number) for place, each in places.items() if (number := each[at]) is not None
        )
        yield family(GAUGE, name, text, ("model", "role", "zone"), known)


def fleet_families(status: FleetStatus) -> Iterator[Metric]:
    """Yield metrics of one model's workers and queue."""
    yield gauge("requests_queued", "Requests that wait for a worker", status.queued)
    yield family(
        GAUGE,
        "class_requests_queued",
        "Waiting requests by service class",
        ("class",),
        (((name,), count) for name, count in status.queued_by_class.items()),
    )
    yield gauge(
        "queue_lag_tokens",
        "Largest lag in one class between waiting tenants, in tokens at weight 1",
        status.queue_lag_tokens,
    )
    yield gauge("requests_running", "Requests on workers", status.running)
    yield gauge("retries_left", "Retries that the retry budget can pay for", status.retries_left)
    yield gauge("quarantined_prompts", "Quarantined prompts and grammars", status.quarantined)
    yield from _overload(status)
    yield from _workers(status.workers)


def _overload(status: FleetStatus) -> Iterator[Metric]:
    overload = status.overload
    for name, text, value in (
        ("brownout_level", "Brownout level, from 0 (normal) to 4", overload.brownout),
        ("overload_pressure", "Wait of the default class / its limit", overload.pressure),
        ("owed_tokens", "Prompt tokens that have no first token yet", overload.owed_tokens),
        ("promised_returns", "Refused requests expected to return", overload.expected_returns),
        ("ttft_error_seconds", "Mean error of predicted first tokens", overload.error_s),
        ("guard_limit_tokens", "Limit on prompt tokens without first token", overload.guard_tokens),
        ("line_tokens_per_second", "Tokens per second leaving the queue", overload.tokens_per_s),
    ):
        # Export no sample for an unknown value.
        if value is not None:
            yield gauge(name, text, value)


def _workers(workers: Iterable[WorkerStatus]) -> Iterator[Metric]:
    workers = list(workers)
    # Before a worker announces its name, its address would become a permanent label value.
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
        "Frames that a worker ignored",
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
        "Sequences on a worker by state",
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
      rows: the table.
      labels: names for a worker's role (or pool) and name, or for its name alone.
      workers: the workers; each has a sample in each family.
    """
    for kind, name, text, value in rows:
        samples = (((one.role.value, one.name)[-len(labels) :], value(one)) for one in workers)
        yield family(kind, name, text, labels, samples)


def door_families(
    turns: Turns[Any],
    held_bytes: Callable[[], int],
    refused_bodies: Mapping[Any, int],
) -> Iterator[Metric]:
    """Yield metrics of text process jobs and of request bodies."""
    yield family(
        GAUGE,
        "line_jobs",
        "Text process jobs by state",
        ("state",),
        ((("waiting",), turns.num_waiting), (("running",), turns.num_running)),
    )
    yield counts("line_refusals", "Text jobs refused at a full line", "reason", turns.refused)
    yield gauge("body_bytes", "Memory reserved for request bodies", held_bytes())
    yield counts("body_refusals", "Bodies refused for lack of room", "reason", refused_bodies)


def kept_families(kept: Mapping[str, ResponseStore]) -> Iterator[Metric]:
    """Yield metrics of the response cache and of stored responses; zeros if there are none."""
    nothing = ResponseStore(ResponseCacheConfig())
    for name in ("response_cache", "response_store"):
        store = kept.get(name, nothing)
        if len(store):
            store.expire(trio.current_time())
        yield counts(f"{name}_gone", "Removed answers by reason", "why", store.gone)
        yield gauge(f"{name}_answers", "Stored answers", len(store))
        yield gauge(f"{name}_bytes", "Memory used by stored answers", store.used_bytes)
    yield counts(
        "response_cache_requests",
        "Requests that asked for the response cache, by outcome",
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
"""vLLM's names, and ours for the same values."""
CACHE_USAGE: Final = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
"""The current name, and that of older dashboards."""


def alias_families(
    own_family: Callable[[str], Metric],
    status: FleetStatus,
    model_name: str,
    *,
    is_only: bool = True,
) -> Iterator[Metric]:
    """Yield the same values under the names that vLLM's dashboards and endpoint pickers read.

    Args:
      own_family: returns a family by its own name, without the prefix.
      status: the state of the model's fleet.
      model_name: label of all samples.
      is_only: no other model is served; otherwise `vllm:cache_config` gets the label too.
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
