"""`FleetHistory`: samples metrics over time, for the recent figures of /fleet/status and for the
dashboard's charts of the last hour."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from operator import add
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import trio

from triolet.ids import Role
from triolet.slo.burn_alerts import SPANS_S

from ..slo.event_windows import EventCounts
from ..slo.meter import OTHERS
from ..slo.report import burn_rate, minutes_left
from .fleet import ITL_BUCKETS, TTFT_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from triolet.config import ServerConfig
    from triolet.slo.objectives import ServiceObjective

    from ..scheduling.status import FleetStatus
    from .metrics import Metrics

HistoryRow: TypeAlias = "dict[str, dict[str, Sequence[float]]]"
"""The numbers of one interval: rates and gauges by model and tenant, and events by objective.
Histograms instead of quantiles, so that rows of several servers can be added."""

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
BURN_WINDOW: Final = "1h"
"""Window of the burn rates in the history: the long window of the fastest page."""


class FleetHistory:
    """Samples counters and histograms.

    Args:
      metrics: the metrics to sample.
      config: lengths of the periods, sampling interval, and bounds.
      statuses: returns the fleet status of each model by name.
      wall: returns the Unix time. All servers on a port sample at multiples of the interval.

    Attributes:
      rows: the rows of the last hour, by the number of their interval since 1970.
    """

    def __init__(
        self,
        metrics: Metrics,
        config: ServerConfig,
        statuses: Callable[[], Mapping[str, FleetStatus]],
        wall: Callable[[], float],
    ) -> None:
        self._metrics = metrics
        self._statuses = statuses
        self._wall = wall
        self._config = config
        num_samples = 1 + round(config.recent_s / config.sample_s)
        self._samples: deque[dict[str, Any]] = deque(maxlen=num_samples)
        self.rows: dict[int, HistoryRow] = {}

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.sample()
            await trio.sleep(self._config.sample_s - self._wall() % self._config.sample_s)

    def sample(self) -> None:
        """Sample the current values, once per interval."""
        slot = round(self._wall() / self._config.sample_s)
        if self._samples and self._samples[-1]["slot"] == slot:  # the timer fired early
            return
        now = self._now() | {
            "slot": slot,
            "models": {name: grown(self._metrics, name) for name in self._metrics.fleets},
            "tenants": dict(self._metrics.slos.tenant_tokens),
        }
        if self._samples:
            # Two bounds, because the clock may be set back.
            oldest = slot - round(self._config.history_s / self._config.sample_s)
            kept = {at: row for at, row in self.rows.items() if oldest < at < slot}
            self.rows = kept | {slot: self._row(self._samples[-1], now)}
        self._samples.append(now)

    def since_then(self) -> dict[str, Any]:
        """Return all increases since the oldest recent sample, and its age."""
        now = self._now()
        then = self._samples[0] if self._samples else now
        return {"seconds": now["at_s"] - then["at_s"], **_increases(now, then)}

    def _now(self) -> dict[str, Any]:
        return grown(self._metrics) | {"at_s": trio.current_time()}

    def _row(self, then: dict[str, Any], now: dict[str, Any]) -> HistoryRow:
        seconds = now["at_s"] - then["at_s"]
        statuses = self._statuses()
        models: dict[str, Sequence[float]] = {}
        known = [name for name in now["models"] if name in then["models"]]
        for place, name in enumerate(known):
            increases = _increases(now["models"][name], then["models"][name])
            numbers = _numbers(increases, seconds, statuses.get(name))
            shown = name if place < self._config.history_models else OTHERS
            models[shown] = array("d", map(add, numbers, models.get(shown, [0.0] * len(numbers))))
        # A tenant that used to count under OTHERS may have a smaller count now.
        tenants: dict[str, Sequence[float]] = {
            name: [max(0.0, tokens - then["tenants"].get(name, 0)) / seconds]
            for name, tokens in now["tenants"].items()
        }
        slos, burn_s = self._metrics.slos, SPANS_S[BURN_WINDOW]
        objectives: dict[str, Sequence[float]] = {
            one.objective.name: [
                *one.windows.over(burn_s, slos.clock()),
                *one.windows.over(one.objective.window_s, slos.clock()),
            ]
            for one in slos.counters
        }
        return {"models": models, "tenants": tenants, "objectives": objectives}


def grown(metrics: Metrics, model: str | None = None) -> dict[str, Any]:
    """Return the current values of one model's counters and histograms, or of all models."""
    figures = metrics.figures(model)
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


def _increases(now: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Return the increases of all values."""
    return {
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


def _numbers(increases: dict[str, Any], seconds: float, status: FleetStatus | None) -> list[float]:
    """Return a model's numbers: rates, gauges and cumulative counts of both histograms."""
    counters = increases["counters"]
    ttft, itl = (increases["latencies"][name]["totals"] for name in ("ttft", "itl"))
    workers = () if status is None else status.workers
    decode = [one for one in workers if one.role is Role.DECODE and one.capacity is not None]
    # First tokens plus gaps: counted when tokens are sent, not when the request ends.
    rates = (ttft[-1] + itl[-1], counters["prompt_tokens"], counters["requests_rejected"])
    return [
        *(max(0.0, one) / seconds for one in rates),
        0 if status is None else status.queued,
        sum(one.load.leased_blocks for one in decode),
        sum(one.capacity.num_blocks for one in decode if one.capacity is not None),
        *(max(0.0, one) / seconds for one in (*ttft, *itl)),
    ]


def add_row(row: HistoryRow, other: HistoryRow) -> None:
    """Add another server's row for the same interval."""
    for kind, of_kind in other.items():
        for name, numbers in of_kind.items():
            before = row[kind].get(name, [0.0] * len(numbers))
            row[kind][name] = list(map(add, before, numbers))


def model_figures(numbers: Sequence[float]) -> dict[str, float | None]:
    """Return a model's figures of one interval for the charts; None where nothing happened."""
    tokens, prompt_tokens, refusals, queued, used, blocks, *totals = numbers
    ttft, itl = totals[: len(TTFT_BUCKETS) + 1], totals[len(TTFT_BUCKETS) + 1 :]
    return {
        "tokens_per_s": tokens,
        "prompt_tokens_per_s": prompt_tokens,
        "refusals_per_s": refusals,
        "queued": queued,
        "kv_used_share": used / blocks if blocks else None,
        "ttft_p50_s": _quantile(TTFT_BUCKETS, ttft, 0.5),
        "ttft_p99_s": _quantile(TTFT_BUCKETS, ttft, 0.99),
        "itl_p50_s": _quantile(ITL_BUCKETS, itl, 0.5),
        "itl_p99_s": _quantile(ITL_BUCKETS, itl, 0.99),
    }


def objective_figures(
    objective: ServiceObjective, numbers: Sequence[float], observed_s: float
) -> dict[str, float | None]:
    """Return an objective's burn rate and remaining budget at the end of an interval."""
    burnt, whole = EventCounts(*map(int, numbers[:2])), EventCounts(*map(int, numbers[2:]))
    return {
        "burn_rate": burn_rate(objective, burnt),
        "remaining_minutes": minutes_left(objective, whole, observed_s),
    }


def _quantile(bounds: Sequence[float], totals: Sequence[float], share: float) -> float | None:
    """Return a quantile of cumulative counts, interpolated in its bucket as in Prometheus."""
    wanted = share * totals[-1]
    if not wanted:
        return None
    place = bisect_left(totals, wanted)
    if place >= len(bounds):  # above the highest finite bound
        return bounds[-1]
    lower, below = (bounds[place - 1], totals[place - 1]) if place else (0.0, 0.0)
    return lower + (bounds[place] - lower) * (wanted - below) / (totals[place] - below)
