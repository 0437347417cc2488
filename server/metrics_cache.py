"""The workers' prefix caches as the metrics show them, at the moment of a scrape.

On prefill a hit is prompt tokens that are not computed again, on decode such whose KV does not
travel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from .api.ports import FleetView

LABELS: Final = ("role", "worker")
COUNTS: Final = {
    "queried_tokens": "Prompt tokens that were looked up",
    "hit_tokens": "Prompt tokens whose KV was there",
    "evicted_blocks": "Cached blocks that gave way to others",
    "spilled_blocks": "Cached blocks that went to host memory",
    "restored_blocks": "Blocks that came back from host memory",
}


def cache_families(status: FleetView) -> Iterator[Metric]:
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
            continue  # it has not said who it is
        labels = (worker.role.value, worker.name)
        for name, family in counters.items():
            family.add_metric(labels, getattr(worker.load.cache, name))
        host_bytes.add_metric(labels, worker.load.cache.host_bytes)
        tenants.add_metric(labels, worker.load.cache.tenants)
    yield from counters.values()
    yield host_bytes
    yield tenants
