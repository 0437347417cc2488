"""The counters of what clients ask for, by the routes of the map, what was refused, and of
lines of batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter

from .metrics_response_cache import ResponseCacheCollector

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from .response_cache.front import CachingFleet


class HttpMetrics:
    """Told of requests by the surface.

    Args:
      registry: where the counters are shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._response_cache = ResponseCacheCollector()
        registry.register(self._response_cache)
        self._requests = Counter(
            "triolet_http_requests",
            "Requests by the route that answered",
            ("endpoint",),
            registry=registry,
        )
        self._errors = Counter(
            "triolet_http_errors",
            "Requests answered with an error",
            ("status",),
            registry=registry,
        )
        self._batch_lines = Counter(
            "triolet_batch_lines",
            "Lines of batches by how they ended, and what they waited out",
            ("outcome",),
            registry=registry,
        )
        self._ignored = Counter(
            "triolet_ignored_parameters",
            "Parameters of requests that this server does not know and that had no effect",
            ("parameter",),
            registry=registry,
        )
        self._resumptions = Counter(
            "triolet_resumptions",
            "Answers that clients may come back to, and what became of them",
            ("what",),
            registry=registry,
        )

    def ignored(self, name: str) -> None:
        """A request had a parameter without effect; its name is from a bounded set."""
        self._ignored.labels(name).inc()

    def batch_line(self, outcome: str) -> None:
        """A line of a batch has its answer, or was somebody else's."""
        self._batch_lines.labels(outcome).inc()

    def request(self, endpoint: str) -> None:
        """A request came to one of the routes, of which there are as many as the map has."""
        self._requests.labels(endpoint).inc()

    def error(self, status: int) -> None:
        """A request was answered with an error."""
        self._errors.labels(str(status)).inc()

    def resumption(self, what: str) -> None:
        """An answer was begun or joined that outlives its connection, by a word of our own."""
        self._resumptions.labels(what).inc()

    def watch_response_cache(self, cache: CachingFleet) -> None:
        """Answers are given again from now on."""
        self._response_cache.watch(cache)
