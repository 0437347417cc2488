"""The response cache as the metrics show it, at the moment of a scrape."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from triolet.config_response_cache import ResponseCacheConfig

from .generation import CacheOutcome
from .response_cache.store import ResponseStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from .response_cache.front import CachingFleet


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
