"""A histogram cheap enough to observe every token.

The Prometheus client's histogram takes a lock and walks its buckets at each observation, a tenth of
a token's time budget. Here everything runs on one thread.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..scheduling.request import ValueCounts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric


class TokenHistogram(ValueCounts, Collector):
    """Exports counted values as a Prometheus histogram.

    Args:
      name: name of the family.
      text: help text.
      buckets: increasing upper bounds; infinity is added.
      registry: registry to register with.
    """

    def __init__(
        self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        super().__init__(buckets)
        self._name = name
        self._text = text
        # Formatted as by the client library.
        self._shown = [str(floatToGoString(bound)) for bound in self.bounds]  # type: ignore[no-untyped-call]
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Yield the family."""
        family = HistogramMetricFamily(self._name, self._text)
        totals = accumulate(self.counts)
        buckets = list(zip(self._shown, map(float, totals), strict=True))
        family.add_metric((), buckets, self.total)
        yield family
