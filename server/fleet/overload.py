"""What this server takes on, whom it refuses, and what it gives up while there is too much.

Pure. Puts together what was predicted, promised, observed and configured, and says it in words of
errors. Knows requests by their sizes, classes and deadlines; neither the line nor workers, whose
numbers are handed in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.errors import overloaded
from triolet.service_class import ServiceClass

from .brownout import Brownout
from .guard import Guard
from .prediction import Prediction
from .promises import Promises
from .status import OverloadStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from triolet.config_overload import OverloadConfig
    from triolet.errors import RequestError
    from triolet.service_class import Claim

    from .observer import OverloadObserver
    from .prediction import Capacity

UNKNOWN_RETRY_S: Final = 1.0
"""When a refused client should come back where nothing is known of the pace."""


class Ask(NamedTuple):
    """What is decided upon.

    Attributes:
      claim: whose it is, and of which class.
      num_tokens: of its prompt, or the least that it may have.
      deadline_s: within which all of it has to be done.
      key: names what it asks for, whoever asks again; 0 for nothing.
      draw: between 0 and 1, at random.
      together_tokens: of all prompts that come in one request with it; 0 if it comes alone.
      is_unread: its prompt was not looked at yet.
      is_modest: its tenant asks for less than its share, beside others.
    """

    claim: Claim
    num_tokens: int
    deadline_s: float
    key: int = 0
    draw: float = 0.5
    together_tokens: int = 0
    is_unread: bool = False
    is_modest: bool = False

    @property
    def all_tokens(self) -> int:
        """Prompt tokens that come if it is taken on."""
        return max(self.num_tokens, self.together_tokens)


@dataclass(slots=True)
class Forecast:
    """What was expected of a request that was taken on, to learn from.

    Attributes:
      service_class: whose deadline it has.
      num_tokens: of its prompt.
      line_s: predicted wait in the line, uncorrected; None if nothing was known.
      ttft_s: predicted first token; None likewise.
      first_token_by: after which its first token is worth nothing; None for never.
      slo_s: of its class; None for none.
      computing_s: what workers had to compute before its first token, at dispatch.
      idle_s: in which no worker could have taken anybody, before it came.
      is_owed: it has neither a first token nor an end.
      is_on_worker: it was dispatched.
      is_promised: it came back when it was told to.
    """

    service_class: ServiceClass
    num_tokens: int
    line_s: float | None
    ttft_s: float | None
    first_token_by: float | None
    slo_s: float | None
    computing_s: float = 0.0
    idle_s: float = 0.0
    is_owed: bool = True
    is_on_worker: bool = False
    is_promised: bool = False

    def of_sibling(self, due: float) -> Forecast:
        """Return what is expected of another one of the same request, which waits for its siblings
        and is due with the answer: nothing is to be learnt from how long that is."""
        by = None if self.first_token_by is None else due
        return replace(self, line_s=None, ttft_s=None, first_token_by=by, slo_s=None)


class Overload:
    """The decisions of one server.

    Args:
      config: bounds, and which mechanisms are on.
      observer: told of what happens.
      now: the time of the start.

    Attributes:
      prediction: of waits.
      promises: to clients that were refused.
      brownout: the level.
      guard: the outer bound.
      idle_s: in which no worker could have taken anybody, in all.
    """

    def __init__(self, config: OverloadConfig, observer: OverloadObserver, now: float) -> None:
        self.prediction = Prediction(now)
        self.promises = Promises(config.admission.max_promises)
        self.brownout = Brownout(config.brownout, now)
        self.guard = Guard(config.guard, config.slo, now)
        self._config = config
        self._observer = observer
        self.idle_s = 0.0
        self._critical_until = now
        self._on_workers = [0] * len(ServiceClass)
        self._returned = [0] * len(ServiceClass)  # prompt tokens of those that wait again

    def judge(self, ask: Ask, tokens_ahead: float, now: float) -> Forecast:
        """Return what is expected of a newcomer.

        Args:
          ask: what it is.
          tokens_ahead: prompt tokens in the line that go before it.
          now: the time.

        Raises:
          RequestError: it is refused, with the seconds after which it will be let in.
        """
        own = ask.claim.service_class
        slo_s = self._config.slo.of(own)
        is_promised = self.promises.kept_by(ask.key, now) is not None
        # Newcomers of higher classes have left room for whoever was told to come now.
        counted = min(own, ServiceClass.DEFAULT) if is_promised else own
        line_s = self.prediction.wait_s(counted, tokens_ahead, now)
        if self.brownout.refuses(own, ask.num_tokens, is_modest=ask.is_modest):
            raise self._refusal(ask, "brownout", self._room_s(own, slo_s, tokens_ahead, now), now)
        wait_s = self._wait_s(counted, line_s, now)
        is_idle = tokens_ahead <= 0 and not self._backlog(own)
        if self._config.admission.is_on and wait_s is not None and not is_idle:
            self._refuse_late(ask, wait_s, now, is_promised=is_promised)
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
            is_promised=is_promised,
        )

    def took(self, ask: Ask, forecast: Forecast, now: float) -> None:
        """Count a request that was taken on."""
        own = forecast.service_class
        self.guard.took(own, forecast.num_tokens)
        self.prediction.arrived(own, forecast.num_tokens, now)
        self.promises.redeem(ask.key, now)
        if forecast.is_promised:
            self._returned[own] += forecast.num_tokens
        if own is ServiceClass.CRITICAL:
            self._critical_until = now + self._config.admission.headroom_memory_s

    def is_hopeless(self, forecast: Forecast, now: float) -> bool:
        """Return whether nothing that is spent now would make the first token come in time."""
        if forecast.first_token_by is None or not forecast.is_owed:
            return False
        own = forecast.service_class
        # A restart of workers is no overload: whoever waited for it is still to be served.
        now -= self.idle_s - forecast.idle_s
        backlog = self._backlog(own)
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
        self._on_workers[forecast.service_class] += forecast.num_tokens
        forecast.is_on_worker = True
        own = forecast.service_class
        if forecast.is_promised:
            self._returned[own] -= forecast.num_tokens
        forecast.computing_s = prediction.computing_s(own, self._backlog(own), now)

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
        if forecast.is_on_worker:
            self.prediction.running_tokens -= forecast.num_tokens
            if held_s is not None:
                self.prediction.ended(held_s, forecast.num_tokens)

    def _settle(self, forecast: Forecast) -> None:
        """Count out what is owed no first token any more."""
        if forecast.is_owed:
            forecast.is_owed = False
            self.guard.gave(forecast.service_class, forecast.num_tokens)
            if forecast.is_on_worker:
                self._on_workers[forecast.service_class] -= forecast.num_tokens
            elif forecast.is_promised:
                self._returned[forecast.service_class] -= forecast.num_tokens

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
        self.promises.forget(now)
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
            promises=len(self.promises),
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

    def _refuse_late(self, ask: Ask, wait_s: float, now: float, *, is_promised: bool) -> None:
        config, prediction = self._config.admission, self.prediction
        own = ask.claim.service_class
        slo_s = self._config.slo.of(own)
        share = config.return_share if is_promised else config.deadline_share
        bound_s = share * (ask.deadline_s - prediction.own_s(ask.num_tokens))
        if slo_s is not None:
            bound_s = min(bound_s, share * slo_s)
        counted = min(own, ServiceClass.DEFAULT) if is_promised else own
        rate = prediction.class_rate(counted, now)
        if is_promised:
            before = self.promises.above_tokens(ask.claim, wait_s, now)
        else:
            before = self.promises.ahead_tokens(ask.claim, max(bound_s, 0.0), now)
            if own is not ServiceClass.CRITICAL:
                before += sum(self._returned[own + 1 : ServiceClass.BATCH])
        if rate is not None:
            wait_s += before / rate
        if wait_s > bound_s:
            reason = "returned" if is_promised else "deadline"
            # Half of what may wait goes first, or whoever comes back would meet a full line.
            raise self._refusal(ask, reason, wait_s - bound_s / 2, now, wait_s)

    def _refusal(
        self, ask: Ask, reason: str, room_in_s: float, now: float, wait_s: float | None = None
    ) -> RequestError:
        own = ask.claim.service_class
        # Promises keep room before whoever comes later, of whatever class but the critical one.
        counted = min(own, ServiceClass.DEFAULT)
        rate = self.prediction.class_rate(counted, now)
        if rate is None:
            retry_s = UNKNOWN_RETRY_S
        else:
            # A prompt that nobody has looked at is as long as others are.
            usual_tokens = round(self.prediction.prompt_tokens) if ask.is_unread else 0
            retry_s = self.promises.promise(
                ask.key,
                ask.claim,
                max(ask.all_tokens, usual_tokens),
                room_in_s=max(room_in_s, 0.0),
                tokens_per_s=rate,
                draw=ask.draw,
                now=now,
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
        return overloaded(f"{what}; send it again when Retry-After says", retry_s, is_spread=True)

    def _room_s(
        self, own: ServiceClass, slo_s: float | None, tokens_ahead: float, now: float
    ) -> float:
        """Return when the wait will be half of what it may be."""
        wait_s = self._wait_s(own, self.prediction.wait_s(own, tokens_ahead, now), now)
        return UNKNOWN_RETRY_S if wait_s is None else max(wait_s - (slo_s or 0.0) / 2, 1.0)

    def _wait_s(self, own: ServiceClass, line_s: float | None, now: float) -> float | None:
        """Return all that a first token waits for but its own prompt."""
        if line_s is None:
            return None
        after_s = self.prediction.residence_s(own, self._backlog(own), now)
        return self.prediction.corrected_s(own, line_s) + after_s

    def _backlog(self, own: ServiceClass) -> int:
        """Return the prompt tokens on workers that are computed before a newcomer's: of its class
        and those above, and of whatever else uses the workers."""
        return self.prediction.capacity.foreign_tokens + sum(self._on_workers[: own + 1])

    def _pressure(self, own: ServiceClass, tokens_ahead: float, now: float) -> float:
        if tokens_ahead <= 0 and not self._backlog(own):
            return 0.0  # what a first token takes by itself is nobody's doing
        slo_s = self._config.slo.of(own)
        wait_s = self._wait_s(own, self.prediction.wait_s(own, tokens_ahead, now), now)
        if wait_s is None or slo_s is None:
            return 0.0
        return wait_s / (self._config.admission.deadline_share * slo_s)
