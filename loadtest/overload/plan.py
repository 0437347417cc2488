"""The experiments of the load lab: loads with and without each mechanism, a surge, clients that
retry, tenants that exceed their share, and real traces.

Pure: plans depend only on the fleet's capacity and a seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from triolet.service_class import Scheduling, ServiceClass

from .arrivals import (
    Arrival,
    NoTraceError,
    Scale,
    Sizes,
    clients,
    conversations,
    in_classes,
    merged,
    on_off,
    poisson,
    requests,
    shifted,
)
from .lab_process import ALL, EVERYTHING, NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SIZES: Final = Sizes()
LOADS: Final = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)
CRITICAL_SHARE: Final = 0.1
MOST_CRITICAL: Final = 0.45
"""Shares of the capacity. The critical class has an SLO up to half of the capacity."""
BELOW: Final = ((ServiceClass.DEFAULT, 0.7), (ServiceClass.SHEDDABLE, 0.3))
"""Shares of the other classes."""
NORMAL_LOAD: Final = 0.6
SURGE_LOAD: Final = 3.0
WEIGHTS: Final = {"one": 1.0, "two": 2.0, "four": 4.0}
EQUAL_LOADS: Final = {"half": 0.5, "same": 1.0, "double": 2.0, "fourfold": 4.0}
"""Shares of the capacity. Each of the four tenants demands more than its fair quarter."""
QUIET_TIMES: Final = 5
"""Factor on the duration: a tenant with few requests needs more time for a p99."""
TRACES: Final = (
    "azure2023_conv.csv",
    "mooncake_conversation.jsonl",
    "sharegpt300_llama-3.1-8b.csv",
)
SERVEGEN: Final = "servegen clients"
HOUR: Final = 10
"""Hour of ServeGen's day with most active clients."""
TRACE_LOADS: Final = (1.0, 2.0)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run of a fleet.

    Attributes:
      kind: kind of experiment.
      case: name of the case within the kind.
      mechanisms: name of the enabled mechanisms.
      arrivals: all requests.
      begin_s: earlier arrivals are not counted.
      end_s: later arrivals are not counted.
      load: multiple of the capacity.
      schedulings: scheduling of tenants.
      do_return: whether refused requests are retried after Retry-After.
    """

    kind: str
    case: str
    mechanisms: str
    arrivals: Sequence[Arrival]
    begin_s: float
    end_s: float
    load: float
    schedulings: Mapping[str, Scheduling] = field(default_factory=dict)
    do_return: bool = False


@dataclass(frozen=True, slots=True)
class Times:
    """Durations of runs.

    Attributes:
      warm_s: warm-up, not counted.
      counted_s: counted time.
      surge_s: duration of the surge, with three times the capacity.
      calm_s: duration before and after the surge.
    """

    warm_s: float = 15.0
    counted_s: float = 60.0
    surge_s: float = 60.0
    calm_s: float = 30.0

    @property
    def whole_s(self) -> float:
        """Time from the first to the last arrival."""
        return self.warm_s + self.counted_s


SHORT: Final = Times(warm_s=5.0, counted_s=20.0, surge_s=60.0, calm_s=15.0)
"""Shorter durations for real processes."""


def steady(capacity: float, load: float, seconds: float, seed: int) -> list[Arrival]:
    """Return Poisson arrivals of all classes.

    Args:
      capacity: the fleet's capacity in requests per second.
      load: multiple of the capacity.
      seconds: duration.
      seed: random seed.
    """
    numbers = random.Random(f"steady {load} {seed}")
    of_critical = min(CRITICAL_SHARE * load, MOST_CRITICAL)

    def stream(share: float) -> list[Arrival]:
        moments = poisson(numbers, share * capacity, seconds)
        return requests(moments, numbers, _LIKE, SIZES)

    critical = [
        replace(arrival, service_class=ServiceClass.CRITICAL) for arrival in stream(of_critical)
    ]
    return merged(critical, in_classes(stream(load - of_critical), BELOW, numbers))


def curve(
    capacity: float, times: Times, loads: Sequence[float] = LOADS, names: Sequence[str] = ALL
) -> list[Experiment]:
    """Return experiments for each load, with and without each mechanism, with the same arrivals."""
    return [
        Experiment("curve", "poisson", name, arrivals, times.warm_s, times.whole_s, load)
        for load in loads
        for arrivals in [steady(capacity, load, times.whole_s, seed=1)]
        for name in names
    ]


def surge(capacity: float, times: Times) -> list[Experiment]:
    """Return a minute of overload between two calm times."""
    calm = steady(capacity, NORMAL_LOAD, times.calm_s, seed=2)
    flood = steady(capacity, SURGE_LOAD, times.surge_s, seed=3)
    after = steady(capacity, NORMAL_LOAD, times.calm_s, seed=4)
    flood_at, after_at = times.calm_s, times.calm_s + times.surge_s
    arrivals = merged(calm, shifted(flood, flood_at), shifted(after, after_at))
    return [
        Experiment("surge", "3x", name, arrivals, flood_at, after_at, SURGE_LOAD)
        for name in (EVERYTHING, NOTHING)
    ]


def returns(capacity: float, times: Times) -> list[Experiment]:
    """Return loads with clients that honour Retry-After: bursts within the capacity on average, and
    a constant overload."""
    numbers = random.Random("returns")
    moments = on_off(numbers, 0.8 * capacity, 2 * times.whole_s, period_s=30.0, share=0.25)
    bursts = requests(moments, numbers, _LIKE, SIZES)
    cases = {
        "bursts of 3.2x": (0.8, bursts, 2 * times.whole_s),
        "steady 2x": (2.0, steady(capacity, 2.0, times.whole_s, seed=5), times.whole_s),
    }
    return [
        Experiment("returns", case, EVERYTHING, arrivals, 0.0, end_s, load, do_return=True)
        for case, (load, arrivals, end_s) in cases.items()
    ]


def tenants(capacity: float, times: Times) -> list[Experiment]:
    """Return loads of tenants that exceed their share: with another tenant below its share, with
    equal weights, and with weights of 1, 2 and 4."""
    seconds = times.whole_s
    long = times.warm_s + QUIET_TIMES * times.counted_s
    half = _of_tenant("b", capacity / 4, long)
    flood = _of_tenant("a", 5 * capacity, long)
    equal = [_of_tenant(name, load * capacity, seconds) for name, load in EQUAL_LOADS.items()]
    weighted = [_of_tenant(name, 2 * capacity, seconds) for name in WEIGHTS]
    schedulings = {name: Scheduling(name, weight=weight) for name, weight in WEIGHTS.items()}

    def one(case: str, name: str, end_s: float, *streams: Sequence[Arrival]) -> Experiment:
        arrivals = merged(*streams)
        load = len(arrivals) / end_s / capacity
        return Experiment(
            "tenants", case, name, arrivals, times.warm_s, end_s, load, schedulings=schedulings
        )

    return [
        one("b alone", EVERYTHING, long, half),
        one("b beside a", EVERYTHING, long, half, flood),
        one("b beside a", NOTHING, long, half, flood),
        one("equal weights", EVERYTHING, seconds, *equal),
        one("equal weights", NOTHING, seconds, *equal),
        one("weights 1:2:4", EVERYTHING, seconds, *weighted),
    ]


def traced(capacity: float, times: Times) -> tuple[list[Experiment], dict[str, str]]:
    """Return real traces scaled to the fleet, and the skipped traces with the reason."""
    skipped: dict[str, str] = {}
    experiments: list[Experiment] = []
    makers: dict[str, Callable[[Scale], list[Arrival]]] = {
        name: lambda scale, name=name: conversations(name, scale)  # type: ignore[misc]
        for name in TRACES
    }
    makers[SERVEGEN] = lambda scale: clients(HOUR, scale, seed=1)
    for name, make in makers.items():
        for load in TRACE_LOADS:
            try:
                arrivals = make(Scale(load * capacity, times.whole_s, _LIKE, SIZES))
            except NoTraceError as error:
                skipped[name] = str(error)
                break
            experiments += [
                Experiment("trace", name, which, arrivals, times.warm_s, times.whole_s, load)
                for which in (EVERYTHING, NOTHING)
            ]
    return experiments, skipped


_LIKE: Final = Arrival(0.0, 1, 1)


def _of_tenant(name: str, rate: float, seconds: float) -> list[Arrival]:
    numbers = random.Random(f"tenant {name}")
    return requests(poisson(numbers, rate, seconds), numbers, replace(_LIKE, tenant=name), SIZES)
