"""What is counted of the queue: who waits, how long, how even it is.

Labels are service classes; tenants are none, of whom there may be any number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import Histogram
from prometheus_client.core import GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from triolet.service_class import ServiceClass

    from .api.ports import FleetView

WAIT_BUCKETS: Final = (.001, .005, .02, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 60, 300)  # fmt: skip


class QueueMetrics:
    """Told of each sequence and input once, when its first attempt begins."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._waits = Histogram(
            "triolet_class_queue_seconds",
            "From submission to dispatch, by service class",
            ("class",),
            buckets=WAIT_BUCKETS,
            registry=registry,
        )

    def dispatched(self, queue_s: float, service_class: ServiceClass) -> None:
        """One has left the queue."""
        self._waits.labels(service_class.name.lower()).observe(queue_s)


def queue_families(status: FleetView) -> Iterator[Metric]:
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
