"""Increases of counters and histograms over the last seconds, for the fleet status and the
dashboard."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triolet.config import ServerConfig

    from .metrics import Metrics

GROWING: Final = (
    "requests_accepted",
    "requests_rejected",
    "attempts_failed",
    "prompt_tokens",
    "cached_prompt_tokens",
)
LATENCIES: Final = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "queue": "queue_seconds",
}


class RecentFigures:
    """Samples of counters and histograms from the last seconds.

    Args:
      metrics: the metrics to sample.
      config: length of the period, and sampling interval.
    """

    def __init__(self, metrics: Metrics, config: ServerConfig) -> None:
        self._metrics = metrics
        self._sample_s = config.sample_s
        num_samples = 1 + round(config.recent_s / config.sample_s)
        self._samples: deque[dict[str, Any]] = deque(maxlen=num_samples)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.sample()
            await trio.sleep(self._sample_s)

    def sample(self) -> None:
        """Sample the current values."""
        self._samples.append(grown(self._metrics) | {"at_s": trio.current_time()})

    def since_then(self) -> dict[str, Any]:
        """Return all increases since the oldest sample, and its age."""
        now = grown(self._metrics) | {"at_s": trio.current_time()}
        then = self._samples[0] if self._samples else now
        return {
            "seconds": now["at_s"] - then["at_s"],
            "counters": {
                name: value - then["counters"][name] for name, value in now["counters"].items()
            },
            "latencies": {
                name: {
                    "bounds_s": histogram["bounds_s"],
                    "totals": [
                        a - b
                        for a, b in zip(
                            histogram["totals"], then["latencies"][name]["totals"], strict=True
                        )
                    ],
                }
                for name, histogram in now["latencies"].items()
            },
        }


def grown(metrics: Metrics) -> dict[str, Any]:
    """Return the current values of counters and histograms that only grow."""
    figures = metrics.figures()
    return {
        "counters": {name: sum(figures[name].values()) for name in GROWING},
        "latencies": {name: _histogram(figures[own]) for name, own in LATENCIES.items()},
    }


def _histogram(buckets: Mapping[str, float]) -> dict[str, list[float]]:
    """Return finite upper bounds [s] and cumulative counts, followed by the total count."""
    finite = {bound: total for bound, total in buckets.items() if bound != "+Inf"}
    return {
        "bounds_s": [float(bound) for bound in finite],
        "totals": [*finite.values(), buckets.get("+Inf", 0.0)],
    }
