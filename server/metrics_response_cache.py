"""The response cache as the metrics show it, at the moment of a scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from .response_cache.front import CachingFleet


class ResponseCacheCollector(Collector):
    """Answers that were given again, and what they take.

    Args:
      cache: which gives them.
    """

    def __init__(self, cache: CachingFleet) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """Yield one family after the other."""
        store = self._cache.store
        store.expire(trio.current_time())
        requests = CounterMetricFamily(
            "triolet_response_cache_requests",
            "Requests that asked for the response cache, by what came of it",
            labels=("outcome",),
        )
        for outcome, count in self._cache.outcomes.items():
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
