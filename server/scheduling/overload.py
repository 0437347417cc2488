"""What a server does about too much load: admission by predicted waits, brownout by levels, and a
limit on outstanding prompt tokens for when predictions are wrong."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.errors import crowded_out, deadline_exceeded
from triolet.service_class import ServiceClass
from triolet.units import SECONDS

from .outcome import Failure, Outcome
from .status import OverloadStatus
from .wait_estimate import (
    MOST_S,
    PATIENCE_S,
    Forecast,
    Outstanding,
    OutstandingRequest,
    Prediction,
    Returns,
    Stage,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from triolet.config import BrownoutConfig, GuardConfig, OverloadConfig, SloConfig
    from triolet.errors import RequestError
    from triolet.service_class import Scheduling

    from .status import OverloadObserver
    from .wait_estimate import FleetCapacity


SMOOTHING_S: Final = 0.5 * SECONDS
"""Over which pressure is averaged: the wait jumps with every long prompt."""


class Level(IntEnum):
    """What is given up; each level includes those below it."""

    NORMAL = 0
    CAP_SHEDDABLE = 1
    """Answers to sheddable requests are short."""
    PAUSE_BATCH = 2
    """Batches are paused."""
    CAP_DEFAULT = 3
    """Answers of the default class are short too, and very long prompts are refused."""
    CRITICAL_ONLY = 4
    """Everything else is refused."""


class Brownout:
    """The level of one server. It moves by one step at a time, each after its pressure has lasted,
    and falls only well below where it rose, so that it does not flicker.

    Args:
      config: thresholds and times.
      now: the time of the start.

    Attributes:
      level: as of the last call of `advance`.
      pressure: of the default class, smoothed.
    """

    def __init__(self, config: BrownoutConfig, now: float) -> None:
        self.level = Level.NORMAL
        self._config = config
        self.pressure = self._critical_pressure = 0.0
        self._advanced_at = self._changed_at = self._steady_since = now

    def advance(self, pressure: float, critical_pressure: float, now: float) -> bool:
        """Let time pass; return whether the level changed.

        Args:
          pressure: predicted wait of a new request of the default class / what it may wait.
          critical_pressure: the same for the critical class.
          now: the time.
        """
        if not self._config.is_on:
            return False
        kept = math.exp(-(now - self._advanced_at) / SMOOTHING_S)
        self._advanced_at = now
        self.pressure = kept * self.pressure + (1 - kept) * pressure
        self._critical_pressure = kept * self._critical_pressure + (1 - kept) * critical_pressure
        step = self._wanted_step()
        if step == 0:
            self._steady_since = now
            return False
        after_s = self._config.rise_after_s if step > 0 else self._config.fall_after_s
        if now - max(self._steady_since, self._changed_at) < after_s:
            return False
        self.level = Level(self.level + step)
        self._changed_at = now
        return True

    def max_tokens(self, service_class: ServiceClass) -> int | None:
        """Return the most tokens that an answer of a class may have; None for no cap."""
        if service_class is ServiceClass.SHEDDABLE and self.level >= Level.CAP_SHEDDABLE:
            return self._config.sheddable_max_tokens
        if service_class is ServiceClass.DEFAULT and self.level >= Level.CAP_DEFAULT:
            return self._config.default_max_tokens
        return None

    def refuses(
        self, service_class: ServiceClass, prompt_tokens: int, *, is_under_share: bool = False
    ) -> bool:
        """Return whether a request is refused by its class or its length. Long prompts of a tenant
        that asks for less than its share are not refused."""
        if service_class is ServiceClass.CRITICAL:
            return False
        if self.level >= Level.CRITICAL_ONLY:
            # Batches are paused; refused they would fail.
            return service_class is not ServiceClass.BATCH
        is_long = prompt_tokens > self._config.long_prompt_tokens and not is_under_share
        is_paused = service_class is ServiceClass.BATCH
        return self.level >= Level.CAP_DEFAULT and is_long and not is_paused

    @property
    def pauses_batch(self) -> bool:
        """Whether batches are paused."""
        return self.level >= Level.PAUSE_BATCH

    def _wanted_step(self) -> int:
        """Return +1, -1 or 0."""
        if self.level < Level.CRITICAL_ONLY and self._reaches(Level(self.level + 1), 1.0):
            return 1
        if self.level > Level.NORMAL and not self._reaches(self.level, self._config.fall_share):
            return -1
        return 0

    def _reaches(self, level: Level, share: float) -> bool:
        """Return whether pressure is at least this share of where a level, or one above it,
        begins."""
        config = self._config
        if self._critical_pressure >= share * config.critical_only_at:
            return True
        begins_at = {
            Level.CAP_SHEDDABLE: config.cap_sheddable_at,
            Level.PAUSE_BATCH: config.pause_batch_at,
            Level.CAP_DEFAULT: config.cap_default_at,
        }.get(level)
        return begins_at is not None and self.pressure >= share * begins_at


LEAST_SAMPLES: Final = 16
"""First tokens without which a window goes on: one late among few is chance."""
LATE: Final = 1.1
"""Of what a class may wait: a first token beyond that is late. Predictions err by less."""
UNDER_SHARE_ROOM: Final = 2
"""Times the limit, for tenants that ask for less than their shares."""
FORGET_WINDOWS: Final = 60
"""Good windows without a refusal after which there is no limit: its cause is gone."""


class AimdLimiter:
    """A limit on prompt tokens without a first token: multiplied by `fall` after a window with late
    first tokens, by `rise` after a good window in which it refused.

    Args:
      config: how it moves.
      slo: which classes have a deadline: what others wait for is not counted.
      outstanding: prompt tokens of the server's requests.
      now: the time of the start.

    Attributes:
      limit_tokens: None as long as no first token came late.
    """

    def __init__(
        self, config: GuardConfig, slo: SloConfig, outstanding: Outstanding, now: float
    ) -> None:
        self.limit_tokens: float | None = None
        self._outstanding = outstanding
        self._timed = [one for one in ServiceClass if slo.of(one) is not None]
        self._config = config
        self._began_at = now
        self._has_refused = False
        self._num_first = self._num_late = self._most_owed = self._num_unused = 0

    def admits(
        self, service_class: ServiceClass, num_tokens: int, *, is_under_share: bool = False
    ) -> bool:
        """Return whether so many more prompt tokens may be owed to a class and those above it,
        which are all that they wait for. Where none are owed they always may."""
        if not self._config.is_on or self.limit_tokens is None:
            return True
        owed = sum(self._outstanding.owed(one) for one in ServiceClass if one <= service_class)
        limit = self.limit_tokens * (UNDER_SHARE_ROOM if is_under_share else 1)
        return not owed or owed + num_tokens <= limit

    def refused(self) -> None:
        """Note that a request was refused by the limit."""
        self._has_refused = True

    def took(self) -> None:
        """Note that more is owed than before."""
        self._most_owed = max(self._most_owed, self._owed)

    def came(self, share: float, now: float) -> None:
        """Note a first token.

        Args:
          share: its wait beyond its own computing / what its class may wait.
          now: the time.
        """
        self._num_first += 1
        self._num_late += share > LATE
        if now - self._began_at >= self._config.window_s and self._num_first >= LEAST_SAMPLES:
            self._close_window(now)

    def _close_window(self, now: float) -> None:
        config = self._config
        if self._num_late > config.late_share * self._num_first:
            base = self._most_owed if self.limit_tokens is None else self.limit_tokens
            self.limit_tokens = max(config.fall * min(base, self._most_owed), config.least_tokens)
            self._num_unused = 0
        elif self.limit_tokens is not None:
            if self._has_refused:
                self.limit_tokens *= config.rise
                self._num_unused = 0
            else:
                self._num_unused += 1
                if self._num_unused >= FORGET_WINDOWS:
                    self.limit_tokens = None
        self._began_at = now
        self._num_first = self._num_late = 0
        self._most_owed = self._owed
        self._has_refused = False

    @property
    def _owed(self) -> int:
        """Prompt tokens owed to classes with a deadline for first tokens."""
        return sum(self._outstanding.owed(one) for one in self._timed)


class Demand(NamedTuple):
    """A new request in numbers.

    Attributes:
      scheduling: its tenant and class.
      num_tokens: of its prompt, or the least that it may have.
      deadline_s: within which all of it has to be done.
      key: names what it asks for, the same when it is sent again; 0 for nothing.
      draw: between 0 and 1, at random.
      together_tokens: of all prompts that come in one request with it; 0 if it comes alone.
      is_unread: its prompt was not tokenised yet.
      is_under_share: its tenant asks for less than its share, beside others.
    """

    scheduling: Scheduling
    num_tokens: int
    deadline_s: float
    key: int = 0
    draw: float = 0.5
    together_tokens: int = 0
    is_unread: bool = False
    is_under_share: bool = False

    @property
    def all_tokens(self) -> int:
        """Prompt tokens that come if it is taken on."""
        return max(self.num_tokens, self.together_tokens)


UNKNOWN_RETRY_S: Final = 1.0
"""`Retry-After` where the rate of the queue is unknown."""


class Look(NamedTuple):
    """What a new request would meet.

    Attributes:
      counted: the class as which it waits.
      queue_s: of waiting in the queue; None where no rate is known.
      wait_s: for all but its own prompt; None likewise.
      refused_for: why it is refused, as it is counted; empty if it is not.
      room_in_s: until there will be room, where it is refused.
    """

    counted: ServiceClass
    queue_s: float | None
    wait_s: float | None
    refused_for: str = ""
    room_in_s: float = 0.0


class Overload:
    """The decisions of one server, in numbers.

    Args:
      config: bounds, and which mechanisms are on.
      observer: told of what happens.
      now: the time of the start.
      overtaken_s: of computing; workers compute shorter prompts beside a longer one.

    Attributes:
      outstanding: prompt tokens of the requests that were taken on.
      prediction: of waits.
      returns: of requests that were refused.
      brownout: the level.
      limiter: the outer bound.
      idle_s: seconds without a worker that could have taken a request.
    """

    def __init__(
        self,
        config: OverloadConfig,
        observer: OverloadObserver,
        now: float,
        overtaken_s: float = math.inf,
    ) -> None:
        self.outstanding = Outstanding()
        self.prediction = Prediction(now, self.outstanding)
        self.returns = Returns(config.admission)
        self.brownout = Brownout(config.brownout, now)
        self.limiter = AimdLimiter(config.guard, config.slo, self.outstanding, now)
        self.idle_s = 0.0
        self._config = config
        self._slo_s = {one: config.slo.of(one) for one in ServiceClass}
        self._observer = observer
        self._overtaken_s = overtaken_s
        self._critical_until = now

    def judge(self, demand: Demand, tokens_ahead: float, now: float) -> Forecast:
        """Return what is expected of a new request.

        Args:
          demand: what it is.
          tokens_ahead: prompt tokens in the queue that go before it.
          now: the time.

        Raises:
          RequestError: it is refused, with the seconds after which it will be let in.
        """
        scheduling, num_tokens = demand.scheduling, demand.num_tokens
        own = scheduling.service_class
        slo_s = self._slo_s[own]
        look = self.look(demand, tokens_ahead, now)
        if look.refused_for:
            raise self._refusal(demand, look, now)
        own_s = self.prediction.own_s(num_tokens)
        limit_s = demand.deadline_s if slo_s is None else min(slo_s + own_s, demand.deadline_s)
        first_by = now + limit_s if self._config.admission.is_on else None
        return Forecast(
            standing=OutstandingRequest(Stage.QUEUED, own, num_tokens),
            submitted_at=now,
            deadline_s=demand.deadline_s,
            is_limited=scheduling.max_running is not None or scheduling.kv_share < 1,
            queue_s=look.queue_s if look.counted is own else None,
            ttft_s=None if look.wait_s is None else look.wait_s + own_s,
            first_token_by=first_by,
            slo_s=slo_s,
            idle_s=self.idle_s,
            key=demand.key,
        )

    def look(self, demand: Demand, tokens_ahead: float, now: float) -> Look:
        """Return what `judge` would find of a request. Changes and counts nothing."""
        own, num_tokens = demand.scheduling.service_class, demand.num_tokens
        is_return = self.returns.is_due(demand.key, now)
        # New requests of higher classes leave room for requests that return when they were told to.
        counted = min(own, ServiceClass.DEFAULT) if is_return else own
        queue_s = self.prediction.wait_s(counted, tokens_ahead, now)
        wait_s = self._wait_s(counted, queue_s, now, num_tokens)
        look, config = Look(counted, queue_s, wait_s), self._config.admission
        if self.brownout.refuses(own, num_tokens, is_under_share=demand.is_under_share):
            room_in_s = self._room_s(own, tokens_ahead, now)
            return look._replace(refused_for="brownout", room_in_s=room_in_s)
        is_idle = tokens_ahead <= 0 and not self._backlog(own, num_tokens)
        if config.is_on and wait_s is not None and not is_idle:
            share = config.return_share if is_return else self._new_request_share(demand, now)
            slo_s = self._slo_s[own]
            limit_s = demand.deadline_s - self.prediction.own_s(num_tokens)
            bound_s = share * (limit_s if slo_s is None else min(limit_s, slo_s))
            if wait_s > bound_s:
                reason = "returned" if is_return else "deadline"
                # Half of what may wait goes first, or one that returns would meet a full queue.
                return look._replace(refused_for=reason, room_in_s=wait_s - bound_s / 2)
        if not self.limiter.admits(own, demand.all_tokens, is_under_share=demand.is_under_share):
            room_in_s = self._room_s(own, tokens_ahead, now)
            return look._replace(refused_for="guard", room_in_s=room_in_s)
        return look

    def took(self, forecast: Forecast, now: float) -> None:
        """Count a request that was taken on."""
        standing = forecast.standing
        assert standing is not None, "a request is counted once"
        self.outstanding.apply(None, standing)
        self.limiter.took()
        self.prediction.arrived(standing.service_class, standing.num_tokens, now)
        self.returns.came(forecast.key, now)
        if standing.service_class is ServiceClass.CRITICAL:
            self._critical_until = now + self._config.admission.headroom_memory_s

    def expired(self, forecast: Forecast | None, now: float) -> Failure | None:
        """Return the end of a request that waits in vain: nothing was spent on it, and its first
        token can not come in time any more. None for any other."""
        if forecast is None or forecast.standing is None or forecast.dispatched_at is not None:
            return None
        if not self._is_too_late(forecast, forecast.standing, now):
            return None
        own = forecast.standing.service_class
        waited_s = now - forecast.submitted_at
        self._observer.refused("expired", own)
        if forecast.queue_s is not None and not forecast.is_limited:
            self.prediction.waited(own, forecast.queue_s, waited_s)
        if forecast.slo_s is None or forecast.deadline_s < forecast.slo_s:
            error = deadline_exceeded("its first token would come after the request's deadline")
            return Failure(Outcome.EXPIRED_DEADLINE, error)
        text = f"it waited {waited_s:.1f} s, and its first token would come too late"
        return Failure(Outcome.EXPIRED, crowded_out(text, max(forecast.slo_s / 2, 1.0)))

    def dispatched(self, forecast: Forecast | None, now: float) -> None:
        """Learn from a request of which an attempt begins; only the first one counts."""
        if forecast is None or forecast.standing is None or forecast.dispatched_at is not None:
            return
        standing = forecast.standing
        own, num_tokens, prediction = standing.service_class, standing.num_tokens, self.prediction
        forecast.dispatched_at = now
        waited_s = now - forecast.submitted_at
        if waited_s > 0.0:
            prediction.left(num_tokens, now, is_limited=forecast.is_limited)
        if forecast.queue_s is not None and not forecast.is_limited:
            prediction.waited(own, forecast.queue_s, waited_s)
        is_long = self._is_long(num_tokens)
        self._move(forecast, OutstandingRequest(Stage.COMPUTING, own, num_tokens, is_long))
        backlog = self._backlog(own, num_tokens)
        forecast.computing_s = prediction.computing_s(own, backlog, now)

    def first_token(self, forecast: Forecast | None, now: float) -> None:
        """Learn from a first token."""
        if forecast is None:
            return
        standing, dispatched_at = forecast.standing, forecast.dispatched_at
        if dispatched_at is None or standing is None or standing.stage is Stage.STREAMING:
            return
        self._move(forecast, standing._replace(stage=Stage.STREAMING))
        ttft_s = now - forecast.submitted_at
        self.prediction.resided(forecast.computing_s, now - dispatched_at)
        if forecast.slo_s is not None:
            own_s = self.prediction.own_s(standing.num_tokens)
            self.limiter.came(max(ttft_s - own_s, 0.0) / forecast.slo_s, now)
        if forecast.ttft_s is not None:
            self.prediction.came(forecast.ttft_s, ttft_s)
            self._observer.predicted(forecast.ttft_s, ttft_s)

    def ended(self, forecast: Forecast | None, now: float, *, is_well: bool) -> None:
        """Count a request out; a good end tells how long it had a row."""
        if forecast is None:
            return
        standing = forecast.standing
        self._move(forecast, None)
        if is_well and standing is not None and forecast.dispatched_at is not None:
            self.prediction.ended(now - forecast.dispatched_at, standing.num_tokens)

    def kept_share(self, service_class: ServiceClass, now: float) -> float:
        """Return the share of each worker that is kept from a class at the moment."""
        if service_class is ServiceClass.CRITICAL or now >= self._critical_until:
            return 0.0
        return self._config.admission.headroom_share

    def sweep(
        self, capacity: FleetCapacity, tokens_ahead: Callable[[ServiceClass], float], now: float
    ) -> None:
        """Let time pass.

        Args:
          capacity: of the workers that may be used.
          tokens_ahead: prompt tokens in the queue before a new request of a class.
          now: the time.
        """
        self.prediction.see(capacity)
        self.returns.forget(now)
        pressure, critical = (
            self._pressure(one, tokens_ahead(one), now)
            for one in (ServiceClass.DEFAULT, ServiceClass.CRITICAL)
        )
        was = self.brownout.level
        if self.brownout.advance(pressure, critical, now):
            self._observer.level_changed(was, self.brownout.level, pressure)

    def status(self, now: float) -> OverloadStatus:
        """Return what there is to be seen."""
        return OverloadStatus(
            brownout=int(self.brownout.level),
            pressure=self.brownout.pressure,
            guard_tokens=self.limiter.limit_tokens,
            owed_tokens=self.outstanding.all_owed,
            expected_returns=len(self.returns),
            tokens_per_s=self.prediction.rate(now),
            error_s=self.prediction.error_s,
        )

    def _move(self, forecast: Forecast, after: OutstandingRequest | None) -> None:
        self.outstanding.apply(forecast.standing, after)
        forecast.standing = after

    def _is_too_late(self, forecast: Forecast, standing: OutstandingRequest, now: float) -> bool:
        """Return whether nothing that is spent now would make the first token come in time."""
        if forecast.first_token_by is None:
            return False
        own, num_tokens = standing.service_class, standing.num_tokens
        # A restart of workers is no overload: requests that waited for it are still to be served.
        now -= self.idle_s - forecast.idle_s
        backlog = self._backlog(own, num_tokens)
        if not backlog:
            return now > forecast.first_token_by
        # Its own prompt as it was counted when it was taken on.
        own_s = self.prediction.own_s(num_tokens)
        rest_s = self.prediction.residence_s(own, backlog, now) + own_s
        return now + rest_s > forecast.first_token_by

    def _new_request_share(self, demand: Demand, now: float) -> float:
        """Return the share of its deadline that a new request may wait: less while refused requests
        are expected before that, by how many of them return. Critical requests, and those of
        tenants below their shares, leave no room."""
        config, own = self._config.admission, demand.scheduling.service_class
        slo_s = self._slo_s[own]
        latest = now + (demand.deadline_s if slo_s is None else min(demand.deadline_s, slo_s))
        leaves_room = not demand.is_under_share and own is not ServiceClass.CRITICAL
        if not leaves_room or not self.returns.are_due_by(latest):
            return config.deadline_share
        kept = config.deadline_share - config.new_request_share
        return config.deadline_share - self.returns.shown_share * kept

    def _refusal(self, demand: Demand, look: Look, now: float) -> RequestError:
        """Return the error for a request that is refused; counts and remembers it."""
        reason, own = look.refused_for, demand.scheduling.service_class
        if reason == "guard":
            self.limiter.refused()
        # Room is kept from new requests of every class but the critical one.
        counted = min(own, ServiceClass.DEFAULT)
        rate = self.prediction.class_rate(counted, now)
        if rate is None:
            retry_s = UNKNOWN_RETRY_S
        else:
            # A prompt that was not read is as long as others are.
            usual_tokens = round(self.prediction.prompt_tokens) if demand.is_unread else 0
            # A request that would be late on an idle fleet can be taken on at no time.
            own_s = self.prediction.own_s(max(demand.num_tokens, usual_tokens))
            retry_s = self.returns.told_s(
                demand.key if own_s < demand.deadline_s else 0,
                demand.scheduling,
                max(demand.all_tokens, usual_tokens) / rate,
                room_in_s=max(look.room_in_s, 0.0),
                draw=demand.draw,
                now=now,
                # Brownout may be over at any time, however many it refuses.
                most_s=PATIENCE_S if reason == "brownout" else MOST_S,
            )
        self._observer.refused(reason, own)
        what = {
            "brownout": f"the server has more to do than it can, and at brownout level "
            f"{self.brownout.level.value} does not take such requests",
            "guard": f"first tokens come late, and {self.outstanding.all_owed} prompt tokens wait "
            "for theirs already",
        }.get(
            reason,
            f"its first token would come too late, after {look.wait_s or 0.0:.1f} s of waiting",
        )
        what = f"{what}; send it again when Retry-After says"
        return crowded_out(what, retry_s, is_spread=rate is not None)

    def _room_s(self, own: ServiceClass, tokens_ahead: float, now: float) -> float:
        """Return the seconds until the wait is half of what it may be."""
        wait_s = self._wait_s(own, self.prediction.wait_s(own, tokens_ahead, now), now)
        slo_s = self._slo_s[own] or 0.0
        return UNKNOWN_RETRY_S if wait_s is None else max(wait_s - slo_s / 2, 1.0)

    def _wait_s(
        self, own: ServiceClass, queue_s: float | None, now: float, num_tokens: int = 1
    ) -> float | None:
        """Return all that the first token of such a prompt waits for but the prompt itself."""
        if queue_s is None:
            return None
        after_s = self.prediction.residence_s(own, self._backlog(own, num_tokens), now)
        return self.prediction.bias[own] * queue_s + after_s

    def _backlog(self, own: ServiceClass, num_tokens: int = 1) -> int:
        """Return the prompt tokens that workers compute before such a prompt, this server's and
        others'."""
        before = self.outstanding.before(own, is_long=self._is_long(num_tokens))
        return self.prediction.capacity.foreign_tokens + before

    def _is_long(self, num_tokens: int) -> bool:
        """Return whether workers compute shorter prompts beside one of so many tokens."""
        return num_tokens > self._overtaken_s * self.prediction.capacity.fastest_tokens_per_s > 0

    def _pressure(self, own: ServiceClass, tokens_ahead: float, now: float) -> float:
        if tokens_ahead <= 0 and not self._backlog(own):
            return 0.0  # a first token's own time is no load
        slo_s = self._slo_s[own]
        wait_s = self._wait_s(own, self.prediction.wait_s(own, tokens_ahead, now), now)
        if wait_s is None or slo_s is None:
            return 0.0
        return wait_s / (self._config.admission.deadline_share * slo_s)
