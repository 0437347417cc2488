"""The counters of what clients ask for, by the routes of the map, what was refused, lines of
batches, and what waits for threads or holds bodies before it is queued."""

from __future__ import annotations

from collections import Counter as Counts
from typing import TYPE_CHECKING

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from .metrics_response_cache import ResponseCacheCollector

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from .door import BodyRoom
    from .response_cache.front import CachingFleet
    from .turns import Turns


class DoorCollector(Collector):
    """Lines for threads and grammars, and bytes of bodies, at the moment of the scrape."""

    def __init__(self) -> None:
        self._lines: Mapping[str, Turns[Any]] = {}
        self._bodies: BodyRoom | None = None

    def watch(self, lines: Mapping[str, Turns[Any]], bodies: BodyRoom) -> None:
        """Show these from now on."""
        self._lines, self._bodies = lines, bodies

    def collect(self) -> Iterable[Metric]:
        """Yield one family after the other."""
        jobs = GaugeMetricFamily(
            "triolet_line_jobs", "Jobs before the queue, by what they do", labels=("line", "state")
        )
        refusals = CounterMetricFamily(
            "triolet_line_refusals", "Jobs that found a line full", labels=("line", "reason")
        )
        for name, turns in self._lines.items():
            jobs.add_metric((name, "waiting"), turns.num_waiting)
            jobs.add_metric((name, "running"), turns.num_running)
            for reason, count in turns.refused.items():
                refusals.add_metric((name, reason), count)
        held = GaugeMetricFamily("triolet_body_bytes", "Room that bodies under way take")
        bodies = CounterMetricFamily(
            "triolet_body_refusals", "Bodies for which there was no room", labels=("reason",)
        )
        if self._bodies is not None:
            held.add_metric((), self._bodies.held_bytes)
            for what, count in self._bodies.refused.items():
                bodies.add_metric((what,), count)
        yield from (jobs, refusals, held, bodies)


class HttpMetrics:
    """Told of requests by the surface.

    Args:
      registry: where the counters are shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._response_cache = ResponseCacheCollector()
        registry.register(self._response_cache)
        self._door = DoorCollector()
        registry.register(self._door)
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
        self._of_queue: Counts[str] = Counts()
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

    def error(self, status: int, *, is_of_queue: bool = False) -> None:
        """A request was answered with an error, perhaps one that the queue has counted too."""
        self._errors.labels(str(status)).inc()
        self._of_queue[str(status)] += is_of_queue

    def errors(self) -> dict[str, float]:
        """Return how many requests were answered with an error, by status."""
        [family] = self._errors.collect()
        return {
            sample.labels["status"]: sample.value
            for sample in family.samples
            if sample.name.endswith("_total")
        }

    def errors_of_queue(self, status: str) -> int:
        """Return how many of those with a status the queue has counted too."""
        return self._of_queue[status]

    def resumption(self, what: str) -> None:
        """An answer was begun or joined that outlives its connection, by a word of our own."""
        self._resumptions.labels(what).inc()

    def watch_response_cache(self, cache: CachingFleet) -> None:
        """Answers are given again from now on."""
        self._response_cache.watch(cache)

    def watch_door(self, lines: Mapping[str, Turns[Any]], bodies: BodyRoom) -> None:
        """Show lines, by name, and bytes of bodies from now on."""
        self._door.watch(lines, bodies)
