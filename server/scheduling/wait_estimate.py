"""When a request gets its first token: predicted for a new one, promised to a refused one.

The wait in the queue is `tokens_ahead / rate`. The rate of the queue is measured while requests
wait, and guessed before that from what workers announce. The time on workers is the tokens that are
computed before by the workers' rate, plus what came on top lately. Each prediction is corrected by
the error of those before it. Refused requests are told to return by a virtual schedule of each
tenant; due times are remembered in a bounded table, by key.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.service_class import ServiceClass
from triolet.units import MILLISECONDS, SECONDS

if TYPE_CHECKING:
    from triolet.config import AdmissionConfig
    from triolet.service_class import Scheduling


MEMORY_S: Final = 15 * SECONDS
"""Over which the rate of the queue is measured: several generations long, so that a batch that ends
at once does not look like speed, nor the time before it like a standstill."""
LEAST_PRIOR_S: Final = 1 * SECONDS
MOST_PRIOR_S: Final = 4 * SECONDS
"""Of waiting, after which the measured rate counts as much as the guessed one: as long as a row is
held, within these bounds."""
ARRIVALS_S: Final = 5 * SECONDS
"""Over which the tokens per second that higher classes bring are measured."""
TRUST: Final = 0.05
"""How far one request moves an estimate: some twenty settle it."""
LEAST_BIAS: Final = 1 / 3
MOST_BIAS: Final = 3.0
"""Bounds of the correction: a larger error is no bias, the rate has to be measured anew."""
NOISE_S: Final = 50 * MILLISECONDS
"""Waits below this are chance, and say nothing of a bias."""
LEAST_SHARE: Final = 0.1
"""Of the rate that a class is assumed to have at least, whatever higher classes bring: they are
bounded too."""


class FleetCapacity(NamedTuple):
    """What the workers that may be used announce.

    Attributes:
      rows: of decode.
      tokens_per_s: prompt tokens that all of them compute; 0 if unknown.
      fastest_tokens_per_s: of the fastest worker, which is all that one prompt can have.
      foreign_tokens: prompt tokens that wait there and are another server's.
    """

    rows: int = 0
    tokens_per_s: float = 0.0
    fastest_tokens_per_s: float = 0.0
    foreign_tokens: int = 0


class Stage(Enum):
    """How far an accepted request is."""

    QUEUED = auto()
    COMPUTING = auto()  # dispatched, without a first token
    STREAMING = auto()  # has its first token


class OutstandingRequest(NamedTuple):
    """What a request counts as in `Outstanding`.

    Attributes:
      stage: how far it is.
      service_class: of the request.
      num_tokens: of its prompt.
      is_long: workers compute shorter prompts of its class beside it.
    """

    stage: Stage
    service_class: ServiceClass
    num_tokens: int
    is_long: bool = False


class Outstanding:
    """Prompt tokens of the accepted requests that have not ended, by stage and class: the one
    place where they are summed up."""

    def __init__(self) -> None:
        self._tokens: Counter[tuple[Stage, ServiceClass, bool]] = Counter()

    def apply(self, before: OutstandingRequest | None, after: OutstandingRequest | None) -> None:
        """Count a request as `after` which was counted as `before`; None for not at all."""
        if before is not None:
            self._tokens[before.stage, before.service_class, before.is_long] -= before.num_tokens
        if after is not None:
            self._tokens[after.stage, after.service_class, after.is_long] += after.num_tokens

    def owed(self, service_class: ServiceClass) -> int:
        """Return the prompt tokens of a class without a first token."""
        return sum(
            self._tokens[stage, service_class, is_long]
            for stage in (Stage.QUEUED, Stage.COMPUTING)
            for is_long in (False, True)
        )

    @property
    def all_owed(self) -> int:
        """Prompt tokens of all classes without a first token."""
        return sum(n for (stage, _, _), n in self._tokens.items() if stage is not Stage.STREAMING)

    @property
    def running(self) -> int:
        """Prompt tokens of the requests on workers."""
        return sum(n for (stage, _, _), n in self._tokens.items() if stage is not Stage.QUEUED)

    def before(self, service_class: ServiceClass, *, is_long: bool) -> int:
        """Return the prompt tokens on workers that are computed before a prompt: all of the classes
        above, and of its class the short ones, the long ones too if it is long itself."""
        return sum(
            self._tokens[Stage.COMPUTING, one, of_long]
            for one in ServiceClass
            for of_long in (False, True)
            if one < service_class or (one is service_class and (is_long or not of_long))
        )


@dataclass(slots=True)
class Forecast:
    """What was expected of an accepted request, and what it counts as.

    Attributes:
      standing: in `Outstanding`; None once it has ended.
      submitted_at: when it came.
      deadline_s: of the whole request.
      is_limited: it may wait for a limit of its tenant, which says nothing of the queue.
      queue_s: predicted wait in the queue, uncorrected; None if unknown.
      ttft_s: predicted time to the first token; None if unknown.
      first_token_by: when its first token becomes useless; None for never.
      slo_s: of its class; None for none.
      idle_s: seconds without a worker that could have taken a request, until it came.
      dispatched_at: of its first attempt; None before.
      computing_s: what workers had to compute before its first token, at dispatch.
      key: names what it asks for.
    """

    standing: OutstandingRequest | None
    submitted_at: float
    deadline_s: float
    is_limited: bool
    queue_s: float | None
    ttft_s: float | None
    first_token_by: float | None
    slo_s: float | None
    idle_s: float = 0.0
    dispatched_at: float | None = None
    computing_s: float = 0.0
    key: int = 0

    def of_later_choice(self, due: float) -> Forecast:
        """Return the forecast of another one of the same client's request, which waits for the
        first and is due with the answer: its wait teaches nothing."""
        by = None if self.first_token_by is None else due
        return replace(self, queue_s=None, ttft_s=None, first_token_by=by, slo_s=None)


class Fading:
    """A sum with old parts that fade.

    Args:
      memory_s: after which about a third is left.
      now: the time of the start.
    """

    def __init__(self, memory_s: float, now: float) -> None:
        self._memory_s = memory_s
        self._at = now
        self._sum = 0.0

    def add(self, amount: float, now: float) -> None:
        """Add something."""
        self._sum = self.total(now) + amount

    def scale(self, share: float) -> None:
        """Take a share of all of it."""
        self._sum *= share

    def total(self, now: float) -> float:
        """Return what is left."""
        if now > self._at:
            self._sum *= math.exp(-(now - self._at) / self._memory_s)
            self._at = now
        return self._sum


class Prediction:
    """What one server has learnt.

    Args:
      now: the time of the start.
      outstanding: prompt tokens of its requests.

    Attributes:
      capacity: as of the last call of `see`.
      error_s: mean absolute error of predicted first tokens, of late.
      bias: by which the predicted waits of each class are corrected.
      prompt_tokens: of the usual request; 0 before any ended well.
    """

    def __init__(self, now: float, outstanding: Outstanding) -> None:
        self.capacity = FleetCapacity()
        self._outstanding = outstanding
        self.error_s = 0.0
        self.bias = [1.0] * len(ServiceClass)
        self._left = Fading(MEMORY_S, now)
        self._waited = Fading(MEMORY_S, now)
        self._is_waiting = False
        self._arrived = [Fading(ARRIVALS_S, now) for _ in ServiceClass]
        self._advanced_at = now
        self._served_s = 0.0
        self.prompt_tokens = 0.0
        self._rest_s = 0.0
        self._worker_bias = 1.0

    def advance(self, now: float, *, is_waiting: bool) -> None:
        """Let time pass. `is_waiting`: requests have waited since the last call, before workers
        that could take them."""
        elapsed_s, self._advanced_at = now - self._advanced_at, now
        self._is_waiting = is_waiting
        if is_waiting:
            self._waited.add(elapsed_s, now)

    def see(self, capacity: FleetCapacity) -> None:
        """Take in what workers announce; what was measured with more or fewer is scaled."""
        was, self.capacity = self.capacity, capacity
        shares = [
            new / old
            for new, old in (
                (float(capacity.rows), float(was.rows)),
                (capacity.tokens_per_s, was.tokens_per_s),
            )
            if old > 0.0 and new > 0.0
        ]
        # A slow change shows in the measured rate; the loss of a worker takes a part of it.
        if shares and not 0.8 < min(shares) < 1.25:
            self._left.scale(min(shares))

    def arrived(self, service_class: ServiceClass, num_tokens: int, now: float) -> None:
        """Count what was taken on."""
        self._arrived[service_class].add(num_tokens, now)

    def left(self, num_tokens: int, now: float, *, is_limited: bool = False) -> None:
        """Count a request that waited and was dispatched. One that may have waited for a limit of
        its tenant (`is_limited`) counts only while others wait."""
        if self._is_waiting or not is_limited:
            self._left.add(num_tokens, now)

    def ended(self, served_s: float, num_tokens: int) -> None:
        """Learn from a request that ended well how long it had a row, and from its prompt."""
        self._served_s = _moved(self._served_s, served_s)
        self.prompt_tokens = _moved(self.prompt_tokens, float(num_tokens))

    def rate(self, now: float) -> float | None:
        """Return the tokens per second at which the queue moves; None if unknown."""
        guess = self._guessed_rate()
        waited_s, left = self._waited.total(now), self._left.total(now)
        if guess is None:
            if waited_s < LEAST_PRIOR_S:
                return None
            # What runs will end and let as much in, so it counts as done now.
            return max(left + self._outstanding.running, 1.0) / waited_s
        # A queue that has not moved yet has not stood still: it may wait for one generation.
        prior_s = min(max(self._served_s, LEAST_PRIOR_S), MOST_PRIOR_S)
        return (left + guess * prior_s) / (waited_s + prior_s)

    def wait_s(self, service_class: ServiceClass, tokens_ahead: float, now: float) -> float | None:
        """Return the wait of a new request in the queue, uncorrected; None if unknown."""
        if tokens_ahead <= 0.0:
            return 0.0
        rate = self.class_rate(service_class, now)
        return None if rate is None else tokens_ahead / rate

    def class_rate(self, service_class: ServiceClass, now: float) -> float | None:
        """Return the rate that higher classes leave."""
        rate = self.rate(now)
        if rate is None:
            return None
        return max(rate - self._higher_rate(service_class, now), LEAST_SHARE * rate, 1e-3)

    def own_s(self, num_tokens: int) -> float:
        """Return the seconds that a prompt alone computes; 0 if no rate is known."""
        rate = self.capacity.fastest_tokens_per_s
        return num_tokens / rate if rate > 0.0 else 0.0

    def computing_s(self, service_class: ServiceClass, num_tokens: int, now: float) -> float:
        """Return the seconds that workers compute so many prompt tokens beside higher classes."""
        rate = self.capacity.tokens_per_s
        if rate <= 0.0:
            return 0.0
        return num_tokens / max(rate - self._higher_rate(service_class, now), LEAST_SHARE * rate)

    def residence_s(self, service_class: ServiceClass, num_tokens: int, now: float) -> float:
        """Return the seconds from dispatch to a first token for which so much is computed."""
        computing_s = self.computing_s(service_class, num_tokens, now)
        return self._worker_bias * computing_s + self._rest_s

    def waited(self, service_class: ServiceClass, predicted_s: float, waited_s: float) -> None:
        """Learn from the wait of a request. `predicted_s` is what `wait_s` said."""
        if max(predicted_s, waited_s) < NOISE_S:
            return
        self.bias[service_class] = _bias(self.bias[service_class], predicted_s, waited_s)

    def resided(self, computing_s: float, resided_s: float) -> None:
        """Learn what comes on top of computing.

        Args:
          computing_s: predicted at dispatch, for the prompt and all that was there before it.
          resided_s: from dispatch to the first token.
        """
        if computing_s < NOISE_S:
            rest_s = min(max(resided_s - computing_s, 0.0), SECONDS)
            self._rest_s += TRUST * (rest_s - self._rest_s)
        else:
            self._worker_bias = _bias(self._worker_bias, computing_s + self._rest_s, resided_s)

    def came(self, predicted_s: float, ttft_s: float) -> None:
        """Learn from the error of a predicted first token."""
        self.error_s += TRUST * (abs(ttft_s - predicted_s) - self.error_s)

    def _higher_rate(self, service_class: ServiceClass, now: float) -> float:
        """Return the tokens per second that higher classes bring."""
        return sum(one.total(now) for one in self._arrived[:service_class]) / ARRIVALS_S

    def _guessed_rate(self) -> float | None:
        """Return the rate that workers should have: the lower one of prefill's rate and, by
        Little's law, that of rows that become free."""
        rates = []
        if self.capacity.tokens_per_s > 0.0:
            rates.append(self.capacity.tokens_per_s)
        if self._served_s > 0.0 and self.capacity.rows:
            rates.append(self.capacity.rows / self._served_s * max(self.prompt_tokens, 1.0))
        return min(rates, default=None)


def _bias(believed: float, predicted_s: float, seen_s: float) -> float:
    """Return the factor that corrects predictions, after another uncorrected one."""
    seen = math.log((seen_s + NOISE_S) / (predicted_s + NOISE_S))
    was = math.log(believed)
    return min(max(math.exp(was + TRUST * (seen - was)), LEAST_BIAS), MOST_BIAS)


def _moved(believed: float, seen: float) -> float:
    return believed + TRUST * (seen - believed) if believed else seen


EARLY_S: Final = 50 * MILLISECONDS
"""A request that comes so much before its due time is in time: clocks and rounding."""
GRACE_S: Final = 3 * SECONDS
"""So much after it, too: `Retry-After` has whole seconds, and networks take their time."""
SHOWN_TRUST: Final = 0.03
"""How far one request that returns, or does not, moves `shown_share`."""
LEAST_S: Final = 0.1
"""Shortest time that is told: less would be over before the answer has arrived."""
PATIENCE_S: Final = 120 * SECONDS
"""Official clients do not retry at all when told to wait longer; others do."""
NEVER: Final = (-inf, "")
MOST_S: Final = 3600 * SECONDS
"""Longest time that is told; a request that would be due later is not remembered."""


class Returns:
    """The refused requests of one server.

    Args:
      config: bounds, and the pace of the schedule.

    Attributes:
      shown_share: of the requests that were told a time, how many return; 1 before any is due, as a
        burst is over before the first of it can return.
    """

    def __init__(self, config: AdmissionConfig) -> None:
        self.shown_share = 1.0
        self._config = config
        self._due: dict[int, tuple[float, str]] = {}  # and of which tenant, by key
        self._num_of: Counter[str] = Counter()
        self._schedules: dict[str, tuple[float, float]] = {}  # end and weight, by tenant
        self._weight = 0.0  # of all that have a schedule
        self._forget_at = 0.0
        self._soonest = inf  # due, or earlier until the next scan

    def __len__(self) -> int:
        return len(self._due)

    def is_due(self, key: int, now: float) -> bool:
        """Return whether a request comes when it was told to."""
        due, _ = self._due.get(key, NEVER)
        return -EARLY_S <= now - due <= GRACE_S

    def are_due_by(self, moment: float) -> bool:
        """Return whether a refused request is expected until a moment."""
        return self._soonest <= moment

    def told_s(
        self,
        key: int,
        scheduling: Scheduling,
        work_s: float,
        *,
        room_in_s: float,
        draw: float,
        now: float,
        most_s: float = MOST_S,
    ) -> float:
        """Return after how many seconds a refused request should come back, and remember that.

        Args:
          key: names what is asked for; 0 for what cannot be known again, or never be in time.
          scheduling: of its tenant, and its class: a critical request is behind no schedule.
          work_s: computing time of its prompt, at the rate that the critical class leaves.
          room_in_s: when the requests that wait now will have made room for it.
          draw: between 0 and 1, at random.
          now: the time.
          most_s: the longest time that is told.
        """
        config = self._config
        standing, _ = self._due.get(key, NEVER)
        if standing - now > EARLY_S:
            return standing - now  # came too early; its place is as it was
        self.came(key, now)
        end, weight = self._schedules.get(scheduling.tenant, (now, 0.0))
        is_behind = scheduling.service_class is not ServiceClass.CRITICAL
        weights = self._weight + scheduling.weight - weight
        step_s = (
            self.shown_share * work_s * weights / (config.return_rate_share * scheduling.weight)
        )
        begin_s = max(room_in_s, end - now) if is_behind else room_in_s
        done_s = begin_s + work_s
        last_s = most_s / config.retry_jitter_most
        spread = config.retry_jitter_most - config.retry_jitter_least
        jitter = config.retry_jitter_least + spread * draw
        wait_s = max(jitter * min(done_s, last_s), LEAST_S)
        if key and done_s <= last_s and self._has_room_for(scheduling.tenant):
            self._due[key] = now + wait_s, scheduling.tenant
            self._num_of[scheduling.tenant] += 1
            self._soonest = min(self._soonest, now + wait_s)
            if is_behind:
                self._weight = weights
                self._schedules[scheduling.tenant] = now + begin_s + step_s, scheduling.weight
        return wait_s

    def came(self, key: int, now: float) -> None:
        """Count a request that came and was decided upon: it is not expected any more."""
        if key not in self._due:
            return
        if now >= self._drop(key) - EARLY_S:
            self._learn(1.0)

    def forget(self, now: float) -> None:
        """Drop requests that did not return, as often as one can become late."""
        if now < self._forget_at:
            return
        self._forget_at = now + GRACE_S
        for key in [key for key, (due, _) in self._due.items() if due + GRACE_S < now]:
            self._drop(key)
            self._learn(0.0)
        self._soonest = min((due for due, _ in self._due.values()), default=inf)
        self._schedules = {name: one for name, one in self._schedules.items() if one[0] > now}
        self._weight = sum(weight for _, weight in self._schedules.values())

    def _has_room_for(self, tenant: str) -> bool:
        """Whether one more of a tenant's is remembered: half of what the others leave, at most."""
        return self._num_of[tenant] < self._config.max_expected_returns - len(self._due)

    def _drop(self, key: int) -> float:
        due, tenant = self._due.pop(key)
        self._num_of[tenant] -= 1
        if not self._num_of[tenant]:
            del self._num_of[tenant]
        return due

    def _learn(self, shown: float) -> None:
        self.shown_share += SHOWN_TRUST * (shown - self.shown_share)
