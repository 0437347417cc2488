"""Overload control: refuses requests with a predicted wait that is too long, lowers service by
brownout levels, and limits outstanding prompt tokens in case predictions are wrong."""

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
"""Time constant for averaging pressure, because the wait jumps with every long prompt."""


class Level(IntEnum):
    """What brownout gives up; each level includes those below it."""

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
    """The brownout level of one server. It moves one step at a time, only after pressure has
    lasted, and falls well below the point where it rose, to avoid flicker.

    Args:
      config: thresholds and times.

    Attributes:
      level: the level after the last `advance`.
      pressure: smoothed pressure of the default class.
    """

    def __init__(self, config: BrownoutConfig, now: float) -> None:
        self.level = Level.NORMAL
        self._config = config
        self.pressure = self._critical_pressure = 0.0
        self._advanced_at = self._changed_at = self._steady_since = now

    def advance(self, pressure: float, critical_pressure: float, now: float) -> bool:
        """Advance to `now`; return whether the level changed.

        Args:
          pressure: predicted wait of a new default-class request / its allowed wait.
          critical_pressure: the same for the critical class.
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
        """Return the limit on the tokens of an answer of a class; None for no limit."""
        if service_class is ServiceClass.SHEDDABLE and self.level >= Level.CAP_SHEDDABLE:
            return self._config.sheddable_max_tokens
        if service_class is ServiceClass.DEFAULT and self.level >= Level.CAP_DEFAULT:
            return self._config.default_max_tokens
        return None

    def refuses(
        self, service_class: ServiceClass, prompt_tokens: int, *, is_under_share: bool = False
    ) -> bool:
        """Return whether a request is refused because of its class or length. Long prompts of a
        tenant below its share are not refused."""
        if service_class is ServiceClass.CRITICAL:
            return False
        if self.level >= Level.CRITICAL_ONLY:
            # Batches are paused; a refusal would make them fail.
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
        """Return whether pressure reaches `share` of the threshold of a level or of a higher
        one."""
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
"""First tokens needed to close a window: one late among few is chance."""
LATE: Final = 1.1
"""A first token is late beyond this multiple of its allowed wait. Predictions err by less."""
UNDER_SHARE_ROOM: Final = 2
"""Multiple of the limit for tenants below their shares."""
FORGET_WINDOWS: Final = 60
"""Good windows without a refusal after which the limit is dropped: its cause is gone."""


class AimdLimiter:
    """A limit on prompt tokens that have no first token yet: multiplied by `fall` after a window
    with late first tokens, and by `rise` after a good window in which it refused.

    Args:
      config: how the limit moves.
      slo: deadlines per class; waits of classes without one are not counted.
      outstanding: prompt tokens of the server's requests.

    Attributes:
      limit_tokens: the limit; None until first tokens came late.
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
        """Return whether this many more prompt tokens fit the limit for a class and those above it,
        which are all that they wait for. They always fit if none are owed."""
        if not self._config.is_on or self.limit_tokens is None:
            return True
        owed = sum(self._outstanding.owed(one) for one in ServiceClass if one <= service_class)
        limit = self.limit_tokens * (UNDER_SHARE_ROOM if is_under_share else 1)
        return not owed or owed + num_tokens <= limit

    def refused(self) -> None:
        """Record that the limit refused a request."""
        self._has_refused = True

    def took(self) -> None:
        """Record that more tokens are owed."""
        self._most_owed = max(self._most_owed, self._owed)

    def came(self, share: float, now: float) -> None:
        """Record a first token.

        Args:
          share: its wait beyond its own computing / its class's allowed wait.
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
      num_tokens: tokens of its prompt, or the fewest it may have.
      deadline_s: seconds within which it must be done.
      key: identifies its content, the same on a resend; 0 if unknown.
      draw: random number between 0 and 1.
      together_tokens: tokens of all prompts in the same client request; 0 if it comes alone.
      is_unread: its prompt is not tokenized yet.
      is_under_share: its tenant uses less than its share while others have requests.
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
        """Prompt tokens added by accepting it and those that come with it."""
        return max(self.num_tokens, self.together_tokens)


UNKNOWN_RETRY_S: Final = 1.0
"""`Retry-After` while the queue's rate is unknown."""


class Look(NamedTuple):
    """What a new request would meet.

    Attributes:
      counted: the class it waits as.
      queue_s: predicted wait in the queue; None while no rate is known.
      wait_s: predicted wait for everything but its own prompt; None likewise.
      refused_for: reason of the refusal; empty if accepted.
      room_in_s: seconds until there will be room, if refused.
    """

    counted: ServiceClass
    queue_s: float | None
    wait_s: float | None
    refused_for: str = ""
    room_in_s: float = 0.0


class Overload:
    """Overload decisions of one server. Pure computation: no I/O.

    Args:
      config: bounds, and which mechanisms are enabled.
      observer: receives events.
      overtaken_s: computing time beyond which workers compute shorter prompts beside a prompt.

    Attributes:
      outstanding: prompt tokens of accepted requests.
      prediction: predicts waits.
      returns: refused requests that are expected back.
      brownout: the brownout level.
      limiter: limit on outstanding prompt tokens.
      idle_s: seconds without a worker that could take a request.
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
        """Return the forecast for a new request.

        Args:
          demand: the request in numbers.
          tokens_ahead: prompt tokens ahead of it in the queue.

        Raises:
          RequestError: refused, with the seconds after which a retry is accepted.
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
        """Return what `judge` would find for a request. Has no side effects."""
        own, num_tokens = demand.scheduling.service_class, demand.num_tokens
        is_return = self.returns.is_due(demand.key, now)
        # New requests of higher classes leave room for requests that return when told to.
        counted = min(own, ServiceClass.DEFAULT) if is_return else own
        queue_s = self.prediction.wait_s(counted, tokens_ahead, now)
        wait_s = self._wait_s(counted, queue_s, now, num_tokens)
        look, config = Look(counted, queue_s, wait_s), self._config.admission
        # The level is that of the shared pool.
        if not demand.scheduling.placement.pools and self.brownout.refuses(
            own, num_tokens, is_under_share=demand.is_under_share
        ):
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
                # Half of the allowed wait must drain first, or a returning request would meet a
                # full queue.
                return look._replace(refused_for=reason, room_in_s=wait_s - bound_s / 2)
        if not self.limiter.admits(own, demand.all_tokens, is_under_share=demand.is_under_share):
            room_in_s = self._room_s(own, tokens_ahead, now)
            return look._replace(refused_for="guard", room_in_s=room_in_s)
        return look

    def took(self, forecast: Forecast, now: float) -> None:
        """Count an accepted request."""
        standing = forecast.standing
        assert standing is not None, "a request is counted once"
        self.outstanding.apply(None, standing)
        self.limiter.took()
        self.prediction.arrived(standing.service_class, standing.num_tokens, now)
        self.returns.came(forecast.key, now)
        if standing.service_class is ServiceClass.CRITICAL:
            self._critical_until = now + self._config.admission.headroom_memory_s

    def expired(self, forecast: Forecast | None, now: float) -> Failure | None:
        """Return the failure for a waiting request if its first token can no longer come in time,
        provided no work was done for it; else None."""
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
        """Learn from the first dispatch of a request."""
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
        """Stop counting a request. A success also teaches how long a row is held."""
        if forecast is None:
            return
        standing = forecast.standing
        self._move(forecast, None)
        if is_well and standing is not None and forecast.dispatched_at is not None:
            self.prediction.ended(now - forecast.dispatched_at, standing.num_tokens)

    def kept_share(self, service_class: ServiceClass, now: float) -> float:
        """Return the share of each worker that is currently withheld from a class."""
        if service_class is ServiceClass.CRITICAL or now >= self._critical_until:
            return 0.0
        return self._config.admission.headroom_share

    def sweep(
        self, capacity: FleetCapacity, tokens_ahead: Callable[[ServiceClass], float], now: float
    ) -> None:
        """Advance to `now`.

        Args:
          capacity: capacity of the usable workers.
          tokens_ahead: returns the prompt tokens ahead of a new request of a class.
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
        """Return the current state of overload control."""
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
        """Return whether even immediate work would bring the first token too late."""
        if forecast.first_token_by is None:
            return False
        own, num_tokens = standing.service_class, standing.num_tokens
        # A restart of workers is not overload: requests that waited for it are still served.
        now -= self.idle_s - forecast.idle_s
        backlog = self._backlog(own, num_tokens)
        if not backlog:
            return now > forecast.first_token_by
        # Count its own prompt as at admission.
        own_s = self.prediction.own_s(num_tokens)
        rest_s = self.prediction.residence_s(own, backlog, now) + own_s
        return now + rest_s > forecast.first_token_by

    def _new_request_share(self, demand: Demand, now: float) -> float:
        """Return the share of its deadline that a new request may wait. It is less while refused
        requests are expected back before then, by the share that usually returns. Critical
        requests, and tenants below their shares, leave no such room."""
        config, own = self._config.admission, demand.scheduling.service_class
        slo_s = self._slo_s[own]
        latest = now + (demand.deadline_s if slo_s is None else min(demand.deadline_s, slo_s))
        leaves_room = not demand.is_under_share and own is not ServiceClass.CRITICAL
        if not leaves_room or not self.returns.are_due_by(latest):
            return config.deadline_share
        kept = config.deadline_share - config.new_request_share
        return config.deadline_share - self.returns.shown_share * kept

    def _refusal(self, demand: Demand, look: Look, now: float) -> RequestError:
        """Return the error for a refused request; count and remember the refusal."""
        reason, own = look.refused_for, demand.scheduling.service_class
        if reason == "guard":
            self.limiter.refused()
        # Room is kept from new requests of every class except the critical one.
        counted = min(own, ServiceClass.DEFAULT)
        rate = self.prediction.class_rate(counted, now)
        if rate is None:
            retry_s = UNKNOWN_RETRY_S
        else:
            # Assume an unread prompt of the usual length.
            usual_tokens = round(self.prediction.prompt_tokens) if demand.is_unread else 0
            # A request that would be late on an idle fleet can never be accepted.
            own_s = self.prediction.own_s(max(demand.num_tokens, usual_tokens))
            retry_s = self.returns.told_s(
                demand.key if own_s < demand.deadline_s else 0,
                demand.scheduling,
                max(demand.all_tokens, usual_tokens) / rate,
                room_in_s=max(look.room_in_s, 0.0),
                draw=demand.draw,
                now=now,
                # Brownout may end at any time, however many it refuses.
                most_s=PATIENCE_S if reason == "brownout" else MOST_S,
            )
        self._observer.refused(reason, own)
        what = {
            "brownout": f"the server is overloaded and does not accept such requests at brownout "
            f"level {self.brownout.level.value}",
            "guard": f"first tokens come late, and {self.outstanding.all_owed} prompt tokens "
            "already wait for theirs",
        }.get(
            reason,
            f"its first token would come too late, after a wait of {look.wait_s or 0.0:.1f} s",
        )
        what = f"{what}; retry after the time in Retry-After"
        return crowded_out(what, retry_s, is_spread=rate is not None)

    def _room_s(self, own: ServiceClass, tokens_ahead: float, now: float) -> float:
        """Return the seconds until the wait is half of the allowed one."""
        wait_s = self._wait_s(own, self.prediction.wait_s(own, tokens_ahead, now), now)
        slo_s = self._slo_s[own] or 0.0
        return UNKNOWN_RETRY_S if wait_s is None else max(wait_s - slo_s / 2, 1.0)

    def _wait_s(
        self, own: ServiceClass, queue_s: float | None, now: float, num_tokens: int = 1
    ) -> float | None:
        """Return the wait for everything except the prompt itself until its first token."""
        if queue_s is None:
            return None
        after_s = self.prediction.residence_s(own, self._backlog(own, num_tokens), now)
        return self.prediction.bias[own] * queue_s + after_s

    def _backlog(self, own: ServiceClass, num_tokens: int = 1) -> int:
        """Return all servers' prompt tokens that workers compute before such a prompt."""
        before = self.outstanding.before(own, is_long=self._is_long(num_tokens))
        return self.prediction.capacity.foreign_tokens + before

    def _is_long(self, num_tokens: int) -> bool:
        """Return whether workers compute shorter prompts beside one of this length."""
        return num_tokens > self._overtaken_s * self.prediction.capacity.fastest_tokens_per_s > 0

    def _pressure(self, own: ServiceClass, tokens_ahead: float, now: float) -> float:
        if tokens_ahead <= 0 and not self._backlog(own):
            return 0.0  # a request's own computing time is not load
        slo_s = self._slo_s[own]
        wait_s = self._wait_s(own, self.prediction.wait_s(own, tokens_ahead, now), now)
        if wait_s is None or slo_s is None:
            return 0.0
        return wait_s / (self._config.admission.deadline_share * slo_s)
