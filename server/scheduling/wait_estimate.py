"""Predicts when a request gets its first token, and schedules the return of refused requests.

The wait in the queue is `tokens_ahead / rate`. The rate of the queue is measured while requests
wait; before that it is guessed from what workers announce. The time on workers is the tokens
computed before the request divided by the workers' rate, plus a recent average of everything else.
Each prediction is corrected by earlier errors. Refused requests get a return time from a virtual
schedule per tenant; due times are kept in a bounded table, by key.
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
"""Time over which the queue's rate is measured: several generations, so that a batch ending at once
does not look fast, nor the time before it look like a standstill."""
LEAST_PRIOR_S: Final = 1 * SECONDS
MOST_PRIOR_S: Final = 4 * SECONDS
"""Bounds on the waiting time after which the measured rate weighs as much as the guessed one.
Within them it is the time that a row is held."""
ARRIVALS_S: Final = 5 * SECONDS
"""Time over which the token rate of higher classes is measured."""
TRUST: Final = 0.05
"""Weight of one request in an estimate: about twenty requests settle it."""
LEAST_BIAS: Final = 1 / 3
MOST_BIAS: Final = 3.0
"""Bounds of the correction. A larger error is not a bias: the rate must be measured again."""
NOISE_S: Final = 50 * MILLISECONDS
"""Waits below this are noise and do not change the bias."""
LEAST_SHARE: Final = 0.1
"""Minimum share of the rate assumed for a class, whatever higher classes use: they are bounded
too."""


class FleetCapacity(NamedTuple):
    """What the usable workers announce.

    Attributes:
      rows: rows of decode workers.
      tokens_per_s: prompt tokens per second of all together; 0 if unknown.
      fastest_tokens_per_s: the fastest worker's rate, the most that one prompt can get.
      foreign_tokens: other servers' prompt tokens that wait there.
    """

    rows: int = 0
    tokens_per_s: float = 0.0
    fastest_tokens_per_s: float = 0.0
    foreign_tokens: int = 0


class Stage(Enum):
    """The progress of an accepted request."""

    QUEUED = auto()
    COMPUTING = auto()  # dispatched, no first token yet
    STREAMING = auto()  # has its first token


class OutstandingRequest(NamedTuple):
    """How a request is counted in `Outstanding`.

    Attributes:
      stage: its progress.
      service_class: its class.
      num_tokens: its prompt tokens.
      is_long: workers compute shorter prompts of its class beside it.
    """

    stage: Stage
    service_class: ServiceClass
    num_tokens: int
    is_long: bool = False


class Outstanding:
    """Sums of the prompt tokens of unfinished accepted requests, by stage and class."""

    def __init__(self) -> None:
        self._tokens: Counter[tuple[Stage, ServiceClass, bool]] = Counter()

    def apply(self, before: OutstandingRequest | None, after: OutstandingRequest | None) -> None:
        """Count a request as `after` instead of `before`; None means not counted."""
        if before is not None:
            self._tokens[before.stage, before.service_class, before.is_long] -= before.num_tokens
        if after is not None:
            self._tokens[after.stage, after.service_class, after.is_long] += after.num_tokens

    def owed(self, service_class: ServiceClass) -> int:
        """Return a class's prompt tokens that have no first token yet."""
        return sum(
            self._tokens[stage, service_class, is_long]
            for stage in (Stage.QUEUED, Stage.COMPUTING)
            for is_long in (False, True)
        )

    @property
    def all_owed(self) -> int:
        """Prompt tokens of all classes that have no first token yet."""
        return sum(n for (stage, _, _), n in self._tokens.items() if stage is not Stage.STREAMING)

    @property
    def running(self) -> int:
        """Prompt tokens of requests on workers."""
        return sum(n for (stage, _, _), n in self._tokens.items() if stage is not Stage.QUEUED)

    def before(self, service_class: ServiceClass, *, is_long: bool) -> int:
        """Return the prompt tokens on workers that are computed before a prompt: those of higher
        classes, and of its own class the short ones, plus the long ones if it is long itself."""
        return sum(
            self._tokens[Stage.COMPUTING, one, of_long]
            for one in ServiceClass
            for of_long in (False, True)
            if one < service_class or (one is service_class and (is_long or not of_long))
        )


@dataclass(slots=True)
class Forecast:
    """The prediction for an accepted request, and how it is counted.

    Attributes:
      standing: how it is counted in `Outstanding`; None once it has ended.
      submitted_at: time of submission.
      deadline_s: deadline for the whole request.
      is_limited: it may wait for a limit of its tenant, which says nothing about the queue.
      queue_s: predicted wait in the queue, uncorrected; None if unknown.
      ttft_s: predicted time to the first token; None if unknown.
      first_token_by: time when its first token becomes useless; None for never.
      slo_s: its class's SLO; None for none.
      idle_s: `Overload.idle_s` at submission.
      dispatched_at: time of its first dispatch; None before.
      computing_s: predicted computing time before its first token, at dispatch.
      key: identifies its content.
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
        """Return the forecast of another choice of the same client request. It waits for the first
        one and is due with the answer, so its wait is not learned from."""
        by = None if self.first_token_by is None else due
        return replace(self, queue_s=None, ttft_s=None, first_token_by=by, slo_s=None)


class Fading:
    """A sum in which old contributions decay.

    Args:
      memory_s: time after which about a third is left.
    """

    def __init__(self, memory_s: float, now: float) -> None:
        self._memory_s = memory_s
        self._at = now
        self._sum = 0.0

    def add(self, amount: float, now: float) -> None:
        """Add an amount."""
        self._sum = self.total(now) + amount

    def scale(self, share: float) -> None:
        """Multiply the sum by `share`."""
        self._sum *= share

    def total(self, now: float) -> float:
        """Return the decayed sum."""
        if now > self._at:
            self._sum *= math.exp(-(now - self._at) / self._memory_s)
            self._at = now
        return self._sum


class Prediction:
    """Predicts waits from what one server has measured.

    Args:
      outstanding: prompt tokens of the server's requests.

    Attributes:
      capacity: capacity from the last `see`.
      error_s: recent mean absolute error of predicted first tokens.
      bias: correction factor of predicted waits, per class.
      prompt_tokens: usual prompt length; 0 before any request succeeded.
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
        """Advance to `now`. `is_waiting`: since the last call, requests waited while workers could
        take them."""
        elapsed_s, self._advanced_at = now - self._advanced_at, now
        self._is_waiting = is_waiting
        if is_waiting:
            self._waited.add(elapsed_s, now)

    def see(self, capacity: FleetCapacity) -> None:
        """Update the announced capacity, and scale what was measured with another one."""
        was, self.capacity = self.capacity, capacity
        shares = [
            new / old
            for new, old in (
                (float(capacity.rows), float(was.rows)),
                (capacity.tokens_per_s, was.tokens_per_s),
            )
            if old > 0.0 and new > 0.0
        ]
        # A slow change shows in the measured rate; losing a worker removes its part at once.
        if shares and not 0.8 < min(shares) < 1.25:
            self._left.scale(min(shares))

    def arrived(self, service_class: ServiceClass, num_tokens: int, now: float) -> None:
        """Count an accepted request."""
        self._arrived[service_class].add(num_tokens, now)

    def left(self, num_tokens: int, now: float, *, is_limited: bool = False) -> None:
        """Count a request that waited and was dispatched. One that may have waited for a limit of
        its tenant (`is_limited`) counts only while others wait."""
        if self._is_waiting or not is_limited:
            self._left.add(num_tokens, now)

    def ended(self, served_s: float, num_tokens: int) -> None:
        """Learn from a successful request how long it held a row, and its prompt length."""
        self._served_s = _moved(self._served_s, served_s)
        self.prompt_tokens = _moved(self.prompt_tokens, float(num_tokens))

    def rate(self, now: float) -> float | None:
        """Return the queue's rate in tokens per second; None if unknown."""
        guess = self._guessed_rate()
        waited_s, left = self._waited.total(now), self._left.total(now)
        if guess is None:
            if waited_s < LEAST_PRIOR_S:
                return None
            # Running requests will end and let as many tokens in, so they count as done now.
            return max(left + self._outstanding.running, 1.0) / waited_s
        # A queue that has not moved yet is not stuck: it may wait for one generation to end.
        prior_s = min(max(self._served_s, LEAST_PRIOR_S), MOST_PRIOR_S)
        return (left + guess * prior_s) / (waited_s + prior_s)

    def wait_s(self, service_class: ServiceClass, tokens_ahead: float, now: float) -> float | None:
        """Return the predicted wait in the queue, uncorrected; None if unknown."""
        if tokens_ahead <= 0.0:
            return 0.0
        rate = self.class_rate(service_class, now)
        return None if rate is None else tokens_ahead / rate

    def class_rate(self, service_class: ServiceClass, now: float) -> float | None:
        """Return the rate that higher classes leave to a class."""
        rate = self.rate(now)
        if rate is None:
            return None
        return max(rate - self._higher_rate(service_class, now), LEAST_SHARE * rate, 1e-3)

    def own_s(self, num_tokens: int) -> float:
        """Return the seconds to compute a prompt alone; 0 if no rate is known."""
        rate = self.capacity.fastest_tokens_per_s
        return num_tokens / rate if rate > 0.0 else 0.0

    def computing_s(self, service_class: ServiceClass, num_tokens: int, now: float) -> float:
        """Return the seconds to compute these prompt tokens beside higher classes."""
        rate = self.capacity.tokens_per_s
        if rate <= 0.0:
            return 0.0
        return num_tokens / max(rate - self._higher_rate(service_class, now), LEAST_SHARE * rate)

    def residence_s(self, service_class: ServiceClass, num_tokens: int, now: float) -> float:
        """Return the seconds from dispatch to a first token that needs these tokens computed."""
        computing_s = self.computing_s(service_class, num_tokens, now)
        return self._worker_bias * computing_s + self._rest_s

    def waited(self, service_class: ServiceClass, predicted_s: float, waited_s: float) -> None:
        """Learn from a request's wait. `predicted_s` is the result of `wait_s`."""
        if max(predicted_s, waited_s) < NOISE_S:
            return
        self.bias[service_class] = _bias(self.bias[service_class], predicted_s, waited_s)

    def resided(self, computing_s: float, resided_s: float) -> None:
        """Learn the time beyond computing.

        Args:
          computing_s: predicted at dispatch for the prompt and everything before it.
          resided_s: measured from dispatch to the first token.
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
        """Return the token rate of higher classes."""
        return sum(one.total(now) for one in self._arrived[:service_class]) / ARRIVALS_S

    def _guessed_rate(self) -> float | None:
        """Return the rate that workers should reach: the lower of prefill's rate and, by Little's
        law, the rate at which rows become free."""
        rates = []
        if self.capacity.tokens_per_s > 0.0:
            rates.append(self.capacity.tokens_per_s)
        if self._served_s > 0.0 and self.capacity.rows:
            rates.append(self.capacity.rows / self._served_s * max(self.prompt_tokens, 1.0))
        return min(rates, default=None)


def _bias(believed: float, predicted_s: float, seen_s: float) -> float:
    """Return the correction factor, updated with another uncorrected prediction."""
    seen = math.log((seen_s + NOISE_S) / (predicted_s + NOISE_S))
    was = math.log(believed)
    return min(max(math.exp(was + TRUST * (seen - was)), LEAST_BIAS), MOST_BIAS)


def _moved(believed: float, seen: float) -> float:
    return believed + TRUST * (seen - believed) if believed else seen


EARLY_S: Final = 50 * MILLISECONDS
"""A request this much before its due time counts as on time: clocks and rounding."""
GRACE_S: Final = 3 * SECONDS
"""A request this much after its due time counts as on time: `Retry-After` has whole seconds, and
networks are slow."""
SHOWN_TRUST: Final = 0.03
"""Weight of one request, returned or not, in `shown_share`."""
LEAST_S: Final = 0.1
"""Shortest return time: a shorter one would be over before the answer arrives."""
PATIENCE_S: Final = 120 * SECONDS
"""Longest return time under brownout: official clients do not retry at all beyond it."""
NEVER: Final = (-inf, "")
MOST_S: Final = 3600 * SECONDS
"""Longest return time; a request due later is not remembered."""


class Returns:
    """The refused requests of one server that are expected back.

    Args:
      config: bounds and the pace of the schedule.

    Attributes:
      shown_share: share of refused requests that return; 1 until any is due, because a burst is
        over before its first request can return.
    """

    def __init__(self, config: AdmissionConfig) -> None:
        self.shown_share = 1.0
        self._config = config
        self._due: dict[int, tuple[float, str]] = {}  # due time and tenant, by key
        self._num_of: Counter[str] = Counter()
        self._schedules: dict[str, tuple[float, float]] = {}  # end and weight, by tenant
        self._weight = 0.0  # of all tenants that have a schedule
        self._forget_at = 0.0
        self._soonest = inf  # earliest due time, or earlier until the next scan

    def __len__(self) -> int:
        return len(self._due)

    def is_due(self, key: int, now: float) -> bool:
        """Return whether a request returns when it was told to."""
        due, _ = self._due.get(key, NEVER)
        return -EARLY_S <= now - due <= GRACE_S

    def are_due_by(self, moment: float) -> bool:
        """Return whether a refused request is expected by a given time."""
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
        """Return the seconds after which a refused request should retry, and remember it.

        Args:
          key: identifies the content; 0 if it cannot be recognized or can never be in time.
          scheduling: its tenant and class; critical requests bypass the schedule.
          work_s: computing time of its prompt at the rate that the critical class leaves.
          room_in_s: seconds until waiting requests have made room for it.
          draw: random number between 0 and 1.
          most_s: upper limit of the result.
        """
        config = self._config
        standing, _ = self._due.get(key, NEVER)
        if standing - now > EARLY_S:
            return standing - now  # too early; it keeps its place
        self.came(key, now)
        end, weight = self._schedules.get(scheduling.claimant, (now, 0.0))
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
        if key and done_s <= last_s and self._has_room_for(scheduling.claimant):
            self._due[key] = now + wait_s, scheduling.claimant
            self._num_of[scheduling.claimant] += 1
            self._soonest = min(self._soonest, now + wait_s)
            if is_behind:
                self._weight = weights
                self._schedules[scheduling.claimant] = now + begin_s + step_s, scheduling.weight
        return wait_s

    def came(self, key: int, now: float) -> None:
        """Count a decided request: it is no longer expected."""
        if key not in self._due:
            return
        if now >= self._drop(key) - EARLY_S:
            self._learn(1.0)

    def forget(self, now: float) -> None:
        """Drop requests that did not return; runs once per `GRACE_S`."""
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
        """Return whether one more of a tenant's requests is remembered: at most half of the
        remaining room."""
        return self._num_of[tenant] < self._config.max_expected_returns - len(self._due)

    def _drop(self, key: int) -> float:
        due, tenant = self._due.pop(key)
        self._num_of[tenant] -= 1
        if not self._num_of[tenant]:
            del self._num_of[tenant]
        return due

    def _learn(self, shown: float) -> None:
        self.shown_share += SHOWN_TRUST * (shown - self.shown_share)
