"""A discrete event simulation of a fleet for tests of admission: a queue, a prefill worker and
decode rows.

Clients arrive by a Poisson process independent of the load (open loop), and return when told to, or
not. Admission is production code; computing is arithmetic.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from server.scheduling.overload import Demand, Overload
from server.scheduling.status import OverloadObserver
from server.scheduling.wait_estimate import FleetCapacity
from triolet.errors import RequestError
from triolet.service_class import Scheduling, ServiceClass

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.scheduling.wait_estimate import Forecast
    from triolet.config import OverloadConfig

SWEEP_S = 0.05


@dataclass(slots=True, eq=False)
class Client:
    """One request, however often it is sent."""

    number: int
    service_class: ServiceClass
    prompt_tokens: int
    output_tokens: int
    came_at: float = 0.0
    first_at: float = 0.0
    forecast: Forecast | None = None
    times_told: int = 0


class Reasons(OverloadObserver):
    """Counts refusals by reason."""

    def __init__(self) -> None:
        self.counts = Counter[tuple[str, str]]()

    def refused(self, reason: str, service_class: ServiceClass) -> None:
        self.counts[reason, service_class.name] += 1


@dataclass
class Report:
    """The results of a run."""

    good: Counter[ServiceClass] = field(default_factory=Counter)
    offered: Counter[ServiceClass] = field(default_factory=Counter)
    refused: Counter[ServiceClass] = field(default_factory=Counter)
    returned: int = 0
    returned_in: int = 0
    ttfts: list[float] = field(default_factory=list)
    levels: list[tuple[float, int]] = field(default_factory=list)
    prefilled_tokens: int = 0
    wasted_tokens: int = 0
    dropped: int = 0

    def late_share(self, bound_s: float) -> float:
        """Return the share of first tokens later than a bound."""
        return sum(ttft > bound_s for ttft in self.ttfts) / max(len(self.ttfts), 1)


class FleetSim:
    """One fleet and its clients.

    Args:
      config: overload settings under test.
      seed: seed of all randomness.
      tokens_per_s: prefill's rate.
      rows: decode's rows.
      token_s: time of an output token.
      comes_back: share of refused clients that return when told.
      is_rounding: clients wait for whole seconds, as in `Retry-After`.
    """

    def __init__(
        self,
        config: OverloadConfig,
        seed: int = 1,
        *,
        tokens_per_s: float = 4000.0,
        rows: int = 32,
        token_s: float = 0.01,
        comes_back: float = 0.0,
        is_rounding: bool = False,
    ) -> None:
        self.config = config
        self.report = Report()
        self.now = 0.0
        self.tokens_per_s = tokens_per_s
        self.rows = rows
        self.reasons = Reasons()
        self.overload = Overload(config, self.reasons, 0.0)
        self._random = random.Random(seed)
        self._token_s = token_s
        self._comes_back = comes_back
        self._is_rounding = is_rounding
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count(1)
        self._line: list[tuple[int, int, Client]] = []
        self._ahead = Counter[ServiceClass]()
        self._prompts: list[tuple[int, int, Client]] = []
        self._is_prefilling = False
        self._backlog = 0
        self._running = 0

    @property
    def capacity_per_s(self) -> float:
        """Requests per second of the usual mix that the fleet can serve."""
        return min(self.tokens_per_s / 200.0, self.rows / (0.05 + 50 * self._token_s))

    def at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), do))

    def offer(
        self, load: float, seconds: float, shares: dict[ServiceClass, float] | None = None
    ) -> None:
        """Set the arrival rate from now on, as a multiple of the capacity."""
        shares = shares or {ServiceClass.DEFAULT: 1.0}
        when = self.now
        while True:
            when += self._random.expovariate(load * self.capacity_per_s)
            if when > self.now + seconds:
                return
            [own] = self._random.choices(list(shares), list(shares.values()))
            client = Client(
                next(self._numbers),
                own,
                int(self._random.lognormvariate(5.0, 0.77)) + 1,
                int(self._random.expovariate(1 / 50)) + 1,
            )
            self.report.offered[own] += 1
            self.at(when, partial(self._come, client))

    def run(self, seconds: float) -> Report:
        """Advance the simulation."""
        end = self.now + seconds
        when = self.now
        while when < end:
            self.at(when, self._sweep)
            when += SWEEP_S
        while self._events and self._events[0][0] <= end:
            self.now, _, do = heapq.heappop(self._events)
            do()
        self.now = end
        return self.report

    def _tokens_ahead(self, own: ServiceClass) -> float:
        return float(sum(n for one, n in self._ahead.items() if one <= own))

    def finish(self) -> Report:
        """Stop arrivals and run until all requests have ended."""
        while any(do.func.__name__ != "_sweep" for _, _, do in self._events):  # type: ignore[attr-defined]
            self.run(SWEEP_S)
        return self.report

    def _come(self, client: Client) -> None:
        if client.times_told:
            self.report.returned += 1
        demand = Demand(
            Scheduling(service_class=client.service_class),
            client.prompt_tokens,
            600.0,
            client.number,
            self._random.random(),
        )
        try:
            ahead = self._tokens_ahead(client.service_class)
            forecast = self.overload.judge(demand, ahead, self.now)
        except RequestError as error:
            self.report.refused[client.service_class] += 1
            client.times_told += 1
            if self._random.random() < self._comes_back:
                wait_s = error.retry_after_s or 0.0
                wait_s = math.ceil(wait_s) if self._is_rounding else wait_s
                self.at(self.now + wait_s, partial(self._come, client))
            return
        self.report.returned_in += client.times_told > 0
        self.overload.took(forecast, self.now)
        client.came_at, client.forecast = self.now, forecast
        self._ahead[client.service_class] += client.prompt_tokens
        heapq.heappush(self._line, (client.service_class, next(self._numbers), client))
        self._dispatch()

    def _dispatch(self) -> None:
        while self._line:
            _, _, client = self._line[0]
            forecast = client.forecast
            assert forecast is not None
            if self.overload.expired(forecast, self.now) is not None:
                self._leave_line()
                self.overload.ended(forecast, self.now, is_well=False)
                self.report.dropped += 1
                continue
            kept = self.overload.kept_share(client.service_class, self.now)
            if self._running >= (1 - kept) * self.rows or self._backlog > 8192:
                return
            self._leave_line()
            self.overload.dispatched(forecast, self.now)
            self._running += 1
            self._backlog += client.prompt_tokens
            heapq.heappush(self._prompts, (client.service_class, next(self._numbers), client))
            self._prefill()

    def _leave_line(self) -> None:
        _, _, client = heapq.heappop(self._line)
        self._ahead[client.service_class] -= client.prompt_tokens

    def _prefill(self) -> None:
        if self._prompts and not self._is_prefilling:
            self._is_prefilling = True
            _, _, client = heapq.heappop(self._prompts)
            took_s = client.prompt_tokens / self.tokens_per_s
            self.at(self.now + took_s, partial(self._first, client))

    def _first(self, client: Client) -> None:
        self._is_prefilling = False
        self._backlog -= client.prompt_tokens
        self.report.prefilled_tokens += client.prompt_tokens
        ttft_s = self.now - client.came_at
        assert client.forecast is not None
        self.overload.first_token(client.forecast, self.now)
        self.report.ttfts.append(ttft_s)
        self.at(self.now + client.output_tokens * self._token_s, partial(self._end, client, ttft_s))
        self._prefill()
        self._dispatch()

    def _end(self, client: Client, ttft_s: float) -> None:
        self._running -= 1
        assert client.forecast is not None
        self.overload.ended(client.forecast, self.now, is_well=True)
        slo_s = self.config.slo.of(client.service_class)
        if slo_s is None or ttft_s <= slo_s:
            self.report.good[client.service_class] += 1
        self._dispatch()

    def _sweep(self) -> None:
        self.overload.prediction.advance(self.now, is_waiting=bool(self._line))
        capacity = FleetCapacity(self.rows, self.tokens_per_s, self.tokens_per_s)
        self.overload.sweep(capacity, self._tokens_ahead, self.now)
        self.report.levels.append((self.now, int(self.overload.brownout.level)))
        self._dispatch()
