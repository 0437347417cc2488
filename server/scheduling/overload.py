"""How much is given up while there is too much: a ladder of levels, climbed and left slowly.

Pure: pressures and time in, a level out. Each level takes what those below it take. One step at a
time, each after its pressure has lasted, and down again only well below where it began, so that a
level never flickers. Knows no queue and no requests.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from triolet.errors import crowded_out
from triolet.service_class import ServiceClass
from triolet.units import SECONDS

from .on_workers import OnWorkers, Prompt
from .request import Forecast
from .returns import MOST_S, PATIENCE_S, Returns
from .status import OverloadStatus
from .wait_estimate import Prediction

if TYPE_CHECKING:
    from collections.abc import Callable

    from triolet.config import BrownoutConfig, GuardConfig, OverloadConfig, SloConfig
    from triolet.errors import RequestError

    from .observer import OverloadObserver
    from .request import Ask
    from .wait_estimate import Capacity


SMOOTHING_S: Final = 0.5 * SECONDS
"""Over which pressures are averaged: the wait jumps with every long prompt."""


class Level(IntEnum):
    """What is given up."""

    NORMAL = 0
    CAP_SHEDDABLE = 1
    """Answers to sheddable requests are short."""
    PAUSE_BATCH = 2
    """Batches stand still."""
    CAP_DEFAULT = 3
    """Answers of the default class are short too, and very long prompts are refused."""
    CRITICAL_ONLY = 4
    """Everything else is refused."""


class Brownout:
    """The level of one server.

    Args:
      config: thresholds and times.
      now: the time of the start.

    Attributes:
      level: as of the last call.
    """

    def __init__(self, config: BrownoutConfig, now: float) -> None:
        self.level = Level.NORMAL
        self._config = config
        self._pressure = self._critical_pressure = 0.0
        self._advanced_at = self._changed_at = self._steady_since = now

    @property
    def pressure(self) -> float:
        """The default class's, smoothed."""
        return self._pressure

    def advance(self, pressure: float, critical_pressure: float, now: float) -> bool:
        """Let time pass; return whether the level changed.

        Args:
          pressure: predicted wait of a newcomer of the default class, of what it may wait.
          critical_pressure: the same for the critical class.
          now: the time.
        """
        if not self._config.is_on:
            return False
        kept = math.exp(-(now - self._advanced_at) / SMOOTHING_S)
        self._advanced_at = now
        self._pressure = kept * self._pressure + (1 - kept) * pressure
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
        """Return how long answers of a class may get; None for no cap."""
        if service_class is ServiceClass.SHEDDABLE and self.level >= Level.CAP_SHEDDABLE:
            return self._config.sheddable_max_tokens
        if service_class is ServiceClass.DEFAULT and self.level >= Level.CAP_DEFAULT:
            return self._config.default_max_tokens
        return None

    def refuses(
        self, service_class: ServiceClass, prompt_tokens: int, *, is_modest: bool = False
    ) -> bool:
        """Return whether a request is refused for what it is. The long prompts of a tenant that
        asks for less than its share (`is_modest`) are not what is too much."""
        if service_class is ServiceClass.CRITICAL:
            return False
        if self.level >= Level.CRITICAL_ONLY:
            # Batches are paused, which costs nobody anything; refused they would fail.
            return service_class is not ServiceClass.BATCH
        is_long = prompt_tokens > self._config.long_prompt_tokens and not is_modest
        is_paused = service_class is ServiceClass.BATCH
        return self.level >= Level.CAP_DEFAULT and is_long and not is_paused

    @property
    def pauses_batch(self) -> bool:
        """Whether batches stand still."""
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
        return begins_at is not None and self._pressure >= share * begins_at


LEAST_SAMPLES: Final = 16
"""First tokens without which a window says nothing and goes on: one late among few is chance."""
LATE: Final = 1.1
"""Of what a class may wait: what is later was not meant by anybody. Up to there predictions are
off now and then."""
MODEST_ROOM: Final = 2
"""Times the limit, up to which those are let in who go before what it was reached by."""
FORGET_WINDOWS: Final = 60
"""Good windows in which it held nobody back, after which there is no limit: the trouble that it was
found in is over."""


class Guard:
    """The limit of one server.

    Args:
      config: how it moves.
      slo: which classes have one: what others are owed makes nobody late.
      now: the time of the start.

    Attributes:
      limit_tokens: that may be owed; None as long as nothing came late.
    """

    def __init__(self, config: GuardConfig, slo: SloConfig, now: float) -> None:
        self.limit_tokens: float | None = None
        self._owed = [0] * len(ServiceClass)
        self._is_timed = [slo.of(one) is not None for one in ServiceClass]
        self._config = config
        self._began_at = now
        self._was_felt = False
        self._num_first = self._num_late = self._most_owed = self._num_unfelt = 0

    @property
    def owed_tokens(self) -> int:
        """Prompt tokens of what was taken on and has no first token yet."""
        return sum(self._owed)

    def admits(
        self, service_class: ServiceClass, num_tokens: int, *, is_modest: bool = False
    ) -> bool:
        """Return whether so many more prompt tokens may be owed to a class and those above it,
        which are all that it waits for. Nobody is refused alone; whoever is, has felt the limit.
        Beyond it there is room for tenants that ask for less than their shares (`is_modest`)."""
        if not self._config.is_on or self.limit_tokens is None:
            return True
        owed = sum(self._owed[: service_class + 1])
        limit = self.limit_tokens * (MODEST_ROOM if is_modest else 1)
        is_admitted = not owed or owed + num_tokens <= limit
        self._was_felt = self._was_felt or not is_admitted
        return is_admitted

    def took(self, service_class: ServiceClass, num_tokens: int) -> None:
        """Count what was taken on."""
        self._owed[service_class] += num_tokens
        self._most_owed = max(self._most_owed, self._timed_tokens)

    def gave(self, service_class: ServiceClass, num_tokens: int) -> None:
        """Count out what has its first token, or its end without one."""
        self._owed[service_class] -= num_tokens

    def came(self, share: float, now: float) -> None:
        """Judge a first token.

        Args:
          share: what it waited beyond its own computing, of what its class may wait.
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
            self._num_unfelt = 0
        elif self.limit_tokens is not None:
            if self._was_felt:
                self.limit_tokens *= config.rise
                self._num_unfelt = 0
            else:
                self._num_unfelt += 1
                if self._num_unfelt >= FORGET_WINDOWS:
                    self.limit_tokens = None
        self._began_at = now
        self._num_first = self._num_late = 0
        self._most_owed = self._timed_tokens
        self._was_felt = False

    @property
    def _timed_tokens(self) -> int:
        """Those owed to classes with a deadline for first tokens."""
        return sum(n for n, is_timed in zip(self._owed, self._is_timed, strict=True) if is_timed)


UNKNOWN_RETRY_S: Final = 1.0
"""When a refused client should come back where nothing is known of the pace."""


class Overload:
    """The decisions of one server.

    Args:
      config: bounds, and which mechanisms are on.
      observer: told of what happens.
      now: the time of the start.
      overtaken_s: of computing; a prompt that takes longer is overtaken on workers.

    Attributes:
      prediction: of waits.
      returns: of requests that were refused.
      brownout: the level.
      guard: the outer bound.
      idle_s: in which no worker could have taken anybody, in all.
    """

    def __init__(
        self,
        config: OverloadConfig,
        observer: OverloadObserver,
        now: float,
        overtaken_s: float = math.inf,
    ) -> None:
        self.prediction = Prediction(now)
        self.returns = Returns(config.admission)
        self.brownout = Brownout(config.brownout, now)
        self.guard = Guard(config.guard, config.slo, now)
        self._config = config
        self._observer = observer
        self.idle_s = 0.0
        self._critical_until = now
        self._on_workers = OnWorkers(overtaken_s)

    def judge(self, ask: Ask, tokens_ahead: float, now: float) -> Forecast:
        """Return what is expected of a newcomer.

        Args:
          ask: what it is.
          tokens_ahead: prompt tokens in the line that go before it.
          now: the time.

        Raises:
          RequestError: it is refused, with the seconds after which it will be let in.
        """
        own = ask.scheduling.service_class
        slo_s = self._config.slo.of(own)
        is_return = self.returns.is_due(ask.key, now)
        # Newcomers of higher classes leave room for requests that return when they were told to.
        counted = min(own, ServiceClass.DEFAULT) if is_return else own
        line_s = self.prediction.wait_s(counted, tokens_ahead, now)
        if self.brownout.refuses(own, ask.num_tokens, is_modest=ask.is_modest):
            raise self._refusal(ask, "brownout", self._room_s(own, slo_s, tokens_ahead, now), now)
        wait_s = self._wait_s(counted, line_s, now, ask.num_tokens)
        is_idle = tokens_ahead <= 0 and not self._backlog(own, ask.num_tokens)
        if self._config.admission.is_on and wait_s is not None and not is_idle:
            self._refuse_late(ask, wait_s, now, is_return=is_return)
        if not self.guard.admits(own, ask.all_tokens, is_modest=ask.is_modest):
            raise self._refusal(ask, "guard", self._room_s(own, slo_s, tokens_ahead, now), now)
        own_s = self.prediction.own_s(ask.num_tokens)
        first_by = None
        if self._config.admission.is_on:
            limit_s = ask.deadline_s if slo_s is None else min(slo_s + own_s, ask.deadline_s)
            first_by = now + limit_s
        return Forecast(
            own,
            ask.num_tokens,
            line_s if counted is own else None,
            None if wait_s is None else wait_s + own_s,
            first_by,
            slo_s,
            idle_s=self.idle_s,
        )

    def took(self, ask: Ask, forecast: Forecast, now: float) -> None:
        """Count a request that was taken on."""
        own = forecast.service_class
        self.guard.took(own, forecast.num_tokens)
        self.prediction.arrived(own, forecast.num_tokens, now)
        self.returns.came(ask.key, now)
        if own is ServiceClass.CRITICAL:
            self._critical_until = now + self._config.admission.headroom_memory_s

    def is_hopeless(self, forecast: Forecast, now: float) -> bool:
        """Return whether nothing that is spent now would make the first token come in time."""
        if forecast.first_token_by is None or not forecast.is_owed:
            return False
        own = forecast.service_class
        # A restart of workers is no overload: whoever waited for it is still to be served.
        now -= self.idle_s - forecast.idle_s
        backlog = self._backlog(own, forecast.num_tokens)
        if not backlog:
            return now > forecast.first_token_by
        # Its own prompt as it was reckoned with when it was taken on.
        own_s = self.prediction.own_s(forecast.num_tokens)
        rest_s = self.prediction.residence_s(own, backlog, now) + own_s
        return now + rest_s > forecast.first_token_by

    def dispatched(
        self,
        forecast: Forecast,
        waited_s: float,
        *,
        has_waited: bool,
        is_limited: bool = False,
        now: float,
    ) -> None:
        """Learn from a sequence whose first attempt begins.

        Args:
          forecast: what was expected of it.
          waited_s: since it was submitted.
          has_waited: it did not go at once, so that it is part of the line's pace.
          is_limited: it may have waited by a limit of its tenant's.
          now: the time.
        """
        prediction = self.prediction
        if has_waited:
            prediction.left(forecast.num_tokens, now, is_limited=is_limited)
        if forecast.line_s is not None and not is_limited:
            prediction.waited(forecast.service_class, forecast.line_s, waited_s)
        prediction.running_tokens += forecast.num_tokens
        forecast.on_worker = self._prompt(forecast.service_class, forecast.num_tokens)
        self._on_workers.add(forecast.on_worker)
        own = forecast.service_class
        forecast.computing_s = prediction.computing_s(
            own, self._backlog(own, forecast.num_tokens), now
        )

    def first_token(self, forecast: Forecast, ttft_s: float, resided_s: float, now: float) -> None:
        """Learn from a first token, `resided_s` after dispatch."""
        if not forecast.is_owed:
            return
        self._settle(forecast)
        self.prediction.resided(forecast.computing_s, resided_s)
        if forecast.slo_s is not None:
            own_s = self.prediction.own_s(forecast.num_tokens)
            self.guard.came(max(ttft_s - own_s, 0.0) / forecast.slo_s, now)
        if forecast.ttft_s is not None:
            self.prediction.came(forecast.ttft_s, ttft_s)
            self._observer.predicted(forecast.ttft_s, ttft_s)

    def ended(self, forecast: Forecast, held_s: float | None) -> None:
        """Count out a sequence; `held_s` is how long it had a row until its good end."""
        self._settle(forecast)
        if forecast.on_worker is not None:
            self.prediction.running_tokens -= forecast.num_tokens
            if held_s is not None:
                self.prediction.ended(held_s, forecast.num_tokens)

    def _settle(self, forecast: Forecast) -> None:
        """Count out what is owed no first token any more."""
        if forecast.is_owed:
            forecast.is_owed = False
            self.guard.gave(forecast.service_class, forecast.num_tokens)
            if forecast.on_worker is not None:
                self._on_workers.remove(forecast.on_worker)

    def kept_share(self, service_class: ServiceClass, now: float) -> float:
        """Return which share of each worker is not for this class at the moment."""
        if service_class is ServiceClass.CRITICAL or now >= self._critical_until:
            return 0.0
        return self._config.admission.headroom_share

    def sweep(
        self, capacity: Capacity, tokens_ahead: Callable[[ServiceClass], float], now: float
    ) -> None:
        """Let time pass.

        Args:
          capacity: of the workers that may be used.
          tokens_ahead: what a newcomer of a class has before it in the line.
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
            guard_tokens=self.guard.limit_tokens,
            owed_tokens=self.guard.owed_tokens,
            expected_returns=len(self.returns),
            tokens_per_s=self.prediction.rate(now),
            error_s=self.prediction.error_s,
        )

    def expired(self, forecast: Forecast, waited_s: float, *, is_limited: bool = False) -> None:
        """Learn from a request that is dropped because its first token would come too late.

        Args:
          forecast: what was expected of it.
          waited_s: since it was submitted.
          is_limited: it may have waited by a limit of its tenant's.
        """
        self._observer.refused("expired", forecast.service_class)
        if forecast.line_s is not None and not is_limited:
            self.prediction.waited(forecast.service_class, forecast.line_s, waited_s)

    def _refuse_late(self, ask: Ask, wait_s: float, now: float, *, is_return: bool) -> None:
        config, own = self._config.admission, ask.scheduling.service_class
        slo_s = self._config.slo.of(own)
        share = config.return_share if is_return else self._newcomer_share(ask, now)
        bound_s = share * (ask.deadline_s - self.prediction.own_s(ask.num_tokens))
        if slo_s is not None:
            bound_s = min(bound_s, share * slo_s)
        if wait_s > bound_s:
            reason = "returned" if is_return else "deadline"
            # Half of what may wait goes first, or whoever comes back would meet a full line.
            raise self._refusal(ask, reason, wait_s - bound_s / 2, now, wait_s)

    def _newcomer_share(self, ask: Ask, now: float) -> float:
        """Return which share of its deadline a newcomer may wait: less while refused requests are
        expected before that, by how many of them return."""
        config, slo_s = self._config.admission, self._config.slo.of(ask.scheduling.service_class)
        latest = now + (ask.deadline_s if slo_s is None else min(ask.deadline_s, slo_s))
        if not self.returns.are_due_by(latest) or _leaves_no_room(ask):
            return config.deadline_share
        kept = config.deadline_share - config.newcomer_share
        return config.deadline_share - self.returns.shown_share * kept

    def _refusal(
        self, ask: Ask, reason: str, room_in_s: float, now: float, wait_s: float | None = None
    ) -> RequestError:
        own = ask.scheduling.service_class
        # Room is kept from newcomers of every class but the critical one.
        counted = min(own, ServiceClass.DEFAULT)
        rate = self.prediction.class_rate(counted, now)
        if rate is None:
            retry_s = UNKNOWN_RETRY_S
        else:
            # A prompt that nobody has looked at is as long as others are.
            usual_tokens = round(self.prediction.prompt_tokens) if ask.is_unread else 0
            # What would be late with nobody before it can be taken on at no time.
            own_s = self.prediction.own_s(max(ask.num_tokens, usual_tokens))
            retry_s = self.returns.told_s(
                ask.key if own_s < ask.deadline_s else 0,
                ask.scheduling,
                max(ask.all_tokens, usual_tokens) / rate,
                room_in_s=max(room_in_s, 0.0),
                draw=ask.draw,
                now=now,
                # Brownout may be over at any time, however many it refuses.
                most_s=PATIENCE_S if reason == "brownout" else MOST_S,
            )
        self._observer.refused(reason, own)
        what = {
            "brownout": f"the server has more to do than it can, and at brownout level "
            f"{self.brownout.level.value} does not take such requests",
            "guard": f"first tokens come late, and {self.guard.owed_tokens} prompt tokens wait "
            "for theirs already",
        }.get(
            reason, f"its first token would come too late, after {wait_s or 0.0:.1f} s of waiting"
        )
        what = f"{what}; send it again when Retry-After says"
        return crowded_out(what, retry_s, is_spread=rate is not None)

    def _room_s(
        self, own: ServiceClass, slo_s: float | None, tokens_ahead: float, now: float
    ) -> float:
        """Return when the wait will be half of what it may be."""
        wait_s = self._wait_s(own, self.prediction.wait_s(own, tokens_ahead, now), now)
        return UNKNOWN_RETRY_S if wait_s is None else max(wait_s - (slo_s or 0.0) / 2, 1.0)

    def _wait_s(
        self, own: ServiceClass, line_s: float | None, now: float, num_tokens: int = 1
    ) -> float | None:
        """Return all that the first token of such a prompt waits for but the prompt itself."""
        if line_s is None:
            return None
        after_s = self.prediction.residence_s(own, self._backlog(own, num_tokens), now)
        return self.prediction.corrected_s(own, line_s) + after_s

    def _backlog(self, own: ServiceClass, num_tokens: int = 1) -> int:
        """Return the prompt tokens on workers that are computed before a newcomer's, and those of
        whatever else uses the workers."""
        before = self._on_workers.before(self._prompt(own, num_tokens))
        return self.prediction.capacity.foreign_tokens + before

    def _prompt(self, own: ServiceClass, num_tokens: int) -> Prompt:
        rate = self.prediction.capacity.fastest_tokens_per_s
        return self._on_workers.prompt(own, num_tokens, rate)

    def _pressure(self, own: ServiceClass, tokens_ahead: float, now: float) -> float:
        if tokens_ahead <= 0 and not self._backlog(own):
            return 0.0  # what a first token takes by itself is nobody's doing
        slo_s = self._config.slo.of(own)
        wait_s = self._wait_s(own, self.prediction.wait_s(own, tokens_ahead, now), now)
        if wait_s is None or slo_s is None:
            return 0.0
        return wait_s / (self._config.admission.deadline_share * slo_s)


def _leaves_no_room(ask: Ask) -> bool:
    """Return whether a newcomer leaves no room for requests that return: a critical one, and one of
    a tenant that asks for less than its share."""
    return ask.is_modest or ask.scheduling.service_class is ServiceClass.CRITICAL
