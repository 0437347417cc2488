"""A histogram that may be observed for every token.

The Prometheus client's own takes a lock and walks its buckets at each observation, which costs a
tenth of what a token may. Here all is on one thread: an observation is a search and two additions.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric


class TokenHistogram(Collector):
    """Counts by upper bound.

    Args:
      name: of the family.
      text: what it says.
      buckets: upper bounds, rising; infinity is added.
      registry: shows it.
    """

    def __init__(
        self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._bounds = [*map(float, buckets), float("inf")]
        self._shown = [_shown(bound) for bound in self._bounds]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, or as many equal ones."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[Metric]:
        """Yield the family."""
        family = HistogramMetricFamily(self._name, self._text)
        totals = accumulate(self._counts)
        buckets = list(zip(self._shown, map(float, totals), strict=True))
        family.add_metric((), buckets, self._sum)
        yield family


def _shown(bound: float) -> str:
    """Return an upper bound as the client library writes it."""
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text
