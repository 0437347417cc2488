"""The cascade of `model: auto`: a model's first tokens are judged before any of them is sent.

A `Cascade` is the one choice of its stream. It holds back the first tokens of the model that was
chosen. Where their mean log-probability is too low it cancels that model's sequence and asks the
next model of the ladder; where that one cannot take the request the first answer is sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
import trio

from triolet.errors import RequestError
from triolet.ids import new_request_id

from ..contract.generation import (
    CacheOutcome,
    CancelReason,
    Delta,
    Failed,
    Finished,
    Verdict,
)
from ..contract.output_stream import OutputStream
from ..tenants.tenancy import current_tenant
from .body import CAP_HEADER, LEVEL_HEADER, VERSION_HEADER
from .limits import asked_of
from .stream import Serializer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from triolet.config import CascadeConfig

    from ..contract.generation import (
        CascadeRecord,
        Event,
        Events,
        Generation,
        GenerationRequest,
        Usage,
    )
    from .generate import Plan
    from .request_scope import RequestScope
    from .served_models import ServedModel
    from .services import Services

    Prepare = Callable[[Plan], Awaitable["Prepared"]]

log = structlog.get_logger(__name__)

CASCADE_HEADER: Final = "x-triolet-cascade"
"""On answers whose first tokens were judged before the head of the answer was sent."""
OF_MODEL: Final = frozenset({VERSION_HEADER, LEVEL_HEADER, CAP_HEADER})
"""Headers that are of the model that answers."""


class Climb(NamedTuple):
    """How an answer may pass to the next model of a ladder.

    Attributes:
      config: tokens and threshold.
      record: what is decided.
      plan_above: returns the same request on the next model above one; None where there is none
        that takes it.
    """

    config: CascadeConfig
    record: CascadeRecord
    plan_above: Callable[[Climb, ServedModel], Awaitable[Plan | None]]


def _nothing() -> None: ...


class Prepared(NamedTuple):
    """A plan with what is generated for it and what writes its answer.

    Attributes:
      plan: of the request on one model.
      requests: one for each choice.
      serializer: of the endpoint, for this model.
      on_submit: called when the requests have been submitted.
      headers: of the answer, that are of this model; a cascade fills them in.
    """

    plan: Plan
    requests: Sequence[GenerationRequest]
    serializer: Serializer
    on_submit: Callable[[], None] = _nothing
    headers: Mapping[str, str] = {}

    @property
    def model(self) -> ServedModel:
        """The model that computes it."""
        return self.plan.model

    @property
    def request(self) -> GenerationRequest:
        """The first choice."""
        return self.requests[0]

    @property
    def is_replayed(self) -> bool:
        """Whether it was answered from the response cache."""
        cache = self.request.cache
        return cache is not None and cache.outcome is CacheOutcome.HIT


def begin(
    first: Prepared, services: Services, live: RequestScope
) -> tuple[OutputStream, Cascade | None]:
    """Begin what was prepared; it ends with nothing but its own end, or a cancel.

    Returns:
      The stream of its answer, and what judges its first tokens; None for nothing.

    Raises:
      RequestError: it was refused, and nothing was begun.
    """
    climb, quotas = first.plan.climb, services.quotas
    if climb is None:
        stream = first.model.fleet.submit(*first.requests)
        first.on_submit()
        return stream, None
    quotas.hold(first.request.request_id)  # where it is refused its reservation is given back
    stream = first.model.fleet.submit(first.request)
    first.on_submit()
    if first.is_replayed:
        # Of a cascade's answers the response cache keeps those that were accepted.
        quotas.charge(first.request.request_id)
        return stream, None
    cascade = Cascade(first._replace(headers=_of_model(live)), climb, stream, services)
    return OutputStream([cascade], cascade.schedule), cascade


class Trial:
    """One model's sequence; its first events are held back.

    Args:
      prepared: what was submitted.
      stream: of its answer.
      is_judged: another model may answer in its place.

    Attributes:
      prepared: as above.
      stream: as above.
      is_judged: as above.
      began_at: when it was submitted, on Trio's clock.
      events: that were taken and not given out.
      is_low: its first tokens are too improbable.
      is_offered: `upper` is known.
      upper: what is asked then; None for nothing.
      over: set once it was given up for another one.
    """

    def __init__(self, prepared: Prepared, stream: OutputStream, *, is_judged: bool) -> None:
        self.prepared, self.stream, self.is_judged = prepared, stream, is_judged
        self.began_at = trio.current_time()
        self.events: list[Event] = []
        self.is_low = self.is_offered = False
        self.upper: Prepared | None = None
        self.over = trio.Event()
        # What goes to the response cache is what is shown.
        self._tap, stream.tap = stream.tap, None

    @property
    def generation(self) -> Generation:
        """Its one choice."""
        return self.stream.generations[0]

    @property
    def last(self) -> Event | None:
        """The last event that is held."""
        return self.events[-1] if self.events else None

    @property
    def num_tokens(self) -> int:
        """Tokens that are held."""
        return sum(len(one.token_ids) for one in self.events if isinstance(one, Delta))

    def mean_logprob(self, tokens: int) -> float | None:
        """Return the mean over so many first tokens, or as many as there are; None for none."""
        deltas = [one for one in self.events if isinstance(one, Delta)]
        scores = [token.logprob for one in deltas for token in one.logprobs][:tokens]
        return sum(scores) / len(scores) if scores else None

    def take(self) -> list[Event]:
        """Return what is held and what has come since, as it would be without a cascade."""
        taken, self.events = self.events, []
        if self.generation.has_events:
            taken += self.generation.take_now()
        if self.prepared.request.sampling.logprobs is None:
            taken = [_unscored(event) for event in taken]
        if self._tap is not None:
            for event in taken:
                self._tap(0, event)
        return taken

    def forget_tap(self) -> None:
        """Have the response cache keep nothing of it."""
        self._tap = None

    def drop(self) -> Usage:
        """End it, whether it has ended before or not; return what it used."""
        self.stream.listen(None)
        self.stream.cancel(CancelReason.PASSED_UP)
        events = list(self.events)
        while taken := self.stream.take():
            events += [event for _, event in taken]
        end = events[-1]
        assert not isinstance(end, Delta), "a cancelled sequence has ended"
        return end.usage


class Cascade:
    """A Generation (server/contract/generation.py) whose model may change before its first event.

    Args:
      first: what was chosen by the features of the request.
      climb: how it may pass to the next model.
      stream: of the first.
      services: what it works with.

    Attributes:
      current: what is generated now, and answers once it is settled.
      settled: set once it is known what answers.
      on_settled: called then.
    """

    def __init__(
        self,
        first: Prepared,
        climb: Climb,
        stream: OutputStream,
        services: Services,
    ) -> None:
        self.settled = trio.Event()
        self.on_settled: Callable[[], None] = _nothing
        self._climb, self._services = climb, services
        self._tenant = current_tenant()
        self._deadline = trio.current_time() + first.request.deadline_s
        self._below: Prepared | None = None
        self._on_filled = _nothing
        self._has_begun = False
        self._is_planned = True  # a task plans the next model
        self._climbing = trio.CancelScope()
        self._hold(first, stream)

    @property
    def request(self) -> GenerationRequest:
        """What is generated now."""
        return self.current.request

    @property
    def has_begun(self) -> bool:
        """Whether a worker was ever asked to compute it."""
        return self._has_begun or self._trial.stream.has_begun

    @property
    def has_events(self) -> bool:
        """Whether events may be taken: none before it is settled."""
        if not self.settled.is_set():
            return False
        return bool(self._trial.events) or self._trial.generation.has_events

    def schedule(self, stream: OutputStream) -> None:
        """Have the stream of the answer delivered soon, with those of the present model."""
        self._trial.stream.schedule(stream)

    def bind(self, on_filled: Callable[[], None]) -> None:
        """Have this called when events are here where there were none."""
        self._on_filled = on_filled
        if self.has_events:
            on_filled()

    def take_now(self) -> Sequence[Event]:
        """Return the events that are here; none before it is settled."""
        taken = self._trial.take() if self.settled.is_set() else []
        if taken and not isinstance(taken[-1], Delta):
            self._on_filled = _nothing  # its reader holds this object
        return taken

    def cancel(self, reason: CancelReason) -> None:
        """End what is generated now, without waiting. Idempotent."""
        if not self.settled.is_set():
            self._settle(Verdict.UNJUDGED if self._trial.is_judged else Verdict.PASSED_UP)
        self._trial.stream.cancel(reason)
        self._on_filled = _nothing  # the last event is here

    async def climb(self, prepare: Prepare, live: RequestScope, within_s: float) -> None:
        """Plan each next model beside the first tokens of the one before it, until it is settled
        what answers, or for so long, or until the deadline. What is passed up later answers without
        a verdict. Called once.

        Args:
          prepare: of the endpoint.
          live: the request; its headers may be named meanwhile.
          within_s: how long.
        """
        self._climbing.deadline = min(trio.current_time() + within_s, self._deadline)
        try:
            with self._climbing:
                while not self.settled.is_set():
                    trial = self._trial
                    if trial.is_judged:
                        model = trial.prepared.model
                        self._offer(await _prepared_above(model, self._climb, prepare, live))
                    await trial.over.wait()
        finally:
            self._is_planned = False
            if not self._trial.is_offered:
                self._offer(None)

    def show(self, live: RequestScope) -> None:
        """Let the headers of the answer be those of the model that answers, if it is known."""
        is_known = self.settled.is_set()
        if is_known and self._climb.record.tried:
            kept = {name: one for name, one in live.headers.items() if name not in OF_MODEL}
            live.headers = kept | dict(self.current.headers)
            live.cache = self.current.request.cache
        if is_known:
            live.headers[CASCADE_HEADER] = self._climb.record.header
        else:
            live.headers.pop(VERSION_HEADER, None)

    def _hold(self, prepared: Prepared, stream: OutputStream) -> None:
        """Hold back the first tokens of a model, or of one that is not judged the first event."""
        is_last = prepared.plan.climb is None or prepared.is_replayed or not self._is_planned
        self.current, self._trial = prepared, Trial(prepared, stream, is_judged=not is_last)
        if prepared.is_replayed:
            self._services.quotas.discard(prepared.request.request_id, is_counted=False)
        stream.listen(self._arrived, self._fail)

    def _arrived(self, events: Events) -> None:
        """Take in the first events of what is generated now."""
        trial = self._trial
        trial.events += [event for _, event in events]
        if isinstance(trial.last, Failed):
            if trial.last.error.status < 500 or not self._go_back():
                self._settle(Verdict.UNJUDGED if trial.is_judged else Verdict.PASSED_UP)
        elif not trial.is_judged:
            if trial.events:
                self._settle(Verdict.PASSED_UP)
        elif isinstance(trial.last, Finished) or trial.num_tokens >= self._climb.config.tokens:
            self._judge()

    def _judge(self) -> None:
        """Compare the mean log-probability of the first tokens with the threshold."""
        config, record, trial = self._climb.config, self._climb.record, self._trial
        mean = trial.mean_logprob(config.tokens)
        if mean is None or config.threshold is None:
            self._settle(Verdict.UNJUDGED)
            return
        record.mean_logprob = mean
        if mean >= config.threshold:
            self._settle(Verdict.ACCEPTED)
            return
        trial.is_low = True
        # What comes now waits for its reader, unread for `plan_s` at most.
        trial.stream.listen(None)
        if trial.is_offered:
            self._go_up()

    def _offer(self, upper: Prepared | None) -> None:
        """Take in what the next model is asked if need be; None where there is none."""
        trial = self._trial
        if self.settled.is_set() or not trial.is_judged:
            return
        trial.upper, trial.is_offered = upper, True
        if trial.is_low:
            self._go_up()

    def _go_up(self) -> None:
        """Ask the next model; where it cannot take the request, keep the answer that there is."""
        trial = self._trial
        upper = trial.upper if self._services.quotas.has_room(self._tenant) else None
        stream = None if upper is None else self._submitted(upper)
        if upper is None or stream is None:
            self._settle(Verdict.KEPT)
            return
        self._climb.record.verdict = Verdict.PASSED_UP
        self._services.metrics.auto.judged(trial.prepared.model.name, Verdict.PASSED_UP)
        self._give_up(upper, stream)

    def _go_back(self) -> bool:
        """Ask the model below anew after the one above failed; return whether it was taken on.

        The seed is the same, and so are the tokens.
        """
        below = self._below
        if below is None:
            return False
        plain = replace(below.request.sampling, scored_tokens=0)
        request = replace(below.request, request_id=new_request_id(), sampling=plain)
        again = below._replace(requests=[request])
        stream = self._submitted(again)
        if stream is None:
            return False
        self._give_up(again, stream)
        self._settle(Verdict.KEPT)
        return True

    def _give_up(self, other: Prepared, stream: OutputStream) -> None:
        """End what is generated now for another one, which has been submitted."""
        record, trial, services = self._climb.record, self._trial, self._services
        name = trial.prepared.model.name
        self._has_begun = self.has_begun
        record.tried.append(name)  # the line of its end says so
        usage = trial.drop()
        services.quotas.discard(self.request.request_id, is_counted=trial.stream.has_begun)
        record.discarded_tokens += usage.completion_tokens
        computed_s = trio.current_time() - trial.began_at - usage.queue_s
        services.metrics.auto.discarded(name, usage.completion_tokens, max(0.0, computed_s))
        self._below = trial.prepared
        self._hold(other, stream)
        trial.over.set()

    def _submitted(self, prepared: Prepared) -> OutputStream | None:
        """Return the stream of another model's answer; None where it is refused."""
        left_s = self._deadline - trio.current_time()
        request = replace(prepared.request, deadline_s=left_s)
        quotas, model = self._services.quotas, prepared.model
        if left_s <= 0:
            return None
        quotas.add_beside(self.request.request_id, asked_of(request, model))
        quotas.hold(request.request_id)
        try:
            stream = model.fleet.submit(request)
        except Exception as error:  # there is an answer without it
            quotas.discard(request.request_id, is_counted=False)
            if isinstance(error, RequestError):
                log.info("cascade_refused", model=model.name, code=error.code)
            else:
                log.error("cascade_failed", model=model.name, exc_info=error)
            return None
        prepared.on_submit()
        return stream

    def _settle(self, verdict: Verdict) -> None:
        """Let what is generated now be the answer."""
        record, trial = self._climb.record, self._trial
        record.verdict = verdict
        if trial.is_judged or verdict is Verdict.KEPT:
            self._services.metrics.auto.judged(trial.prepared.model.name, verdict)
        if verdict is Verdict.KEPT:
            trial.forget_tap()  # a larger model should have answered
        trial.upper = self._below = None  # their prompts may be long
        trial.stream.listen(None)
        cost = self._services.quotas.charge(self.request.request_id)
        if trial.events and not isinstance(trial.last, Delta):
            # The line of its end came before the verdict.
            log.info(
                "cascade_settled",
                request_id=self.request.request_id.hex(),
                model=trial.prepared.model.name,
                **record.fields,
                **({} if cost is None else {"cost": cost.charged}),
            )
        self.settled.set()
        self._climbing.cancel()  # an answer does not wait for a plan that is not needed
        self.on_settled()
        self.on_settled = _nothing
        trial.generation.bind(lambda: self._on_filled())
        if trial.events and not trial.generation.has_events:
            self._on_filled()

    def _fail(self, error: Exception) -> None:
        """End it by an error of this server."""
        log.error("cascade_failed", exc_info=error)
        self.cancel(CancelReason.STOPPED)


async def _prepared_above(
    model: ServedModel, climb: Climb, prepare: Prepare, live: RequestScope
) -> Prepared | None:
    """Return what the next model above one is asked; None if there is none, or it takes too long.

    The headers of the request's answer stay as they are.
    """
    headers, cache = live.headers, live.cache
    live.headers = {name: one for name, one in headers.items() if name not in OF_MODEL}
    try:
        with trio.move_on_after(climb.config.plan_s) as in_time:
            plan = await climb.plan_above(climb, model)
            if plan is None:
                return None
            upper = await prepare(plan)
            request = replace(upper.request, request_id=new_request_id())
            return upper._replace(requests=[request], headers=_of_model(live))
        if in_time.cancelled_caught:
            log.info("cascade_refused", above=model.name, code="plan_timeout", param=None)
    except RequestError as error:
        # Its message may have words of the prompt.
        log.info("cascade_refused", above=model.name, code=error.code, param=error.param)
    except Exception as error:  # there is an answer without it
        log.error("cascade_failed", above=model.name, exc_info=error)
    finally:
        live.headers, live.cache = headers, cache
    return None


def _of_model(live: RequestScope) -> dict[str, str]:
    """Return the headers of a request's answer that are of its model."""
    return {name: live.headers[name] for name in OF_MODEL & live.headers.keys()}


def _unscored(event: Event) -> Event:
    """Return an event without log-probabilities, for which its client did not ask."""
    if isinstance(event, Delta) and event.logprobs:
        return Delta(event.text, event.token_ids)
    return event


class Undecided(Serializer):
    """Writes an answer in the words for the model that answers, once that is known.

    Args:
      cascade: decides it; its events come only then.
    """

    def __init__(self, cascade: Cascade) -> None:
        self._cascade = cascade
        self._chosen: Serializer | None = None

    @property
    def decided(self) -> Serializer:
        """What writes it: this object before that is known."""
        return self if self._chosen is None else self._chosen

    @property
    def keep_alive(self) -> bytes:  # type: ignore[override]
        """Before the answer has begun, what is none of its events."""
        if self._chosen is None:
            return self._cascade.current.serializer.early_keep_alive
        return self._chosen.keep_alive

    def event(self, index: int, event: Event) -> list[bytes]:
        """Return what an event looks like, behind the beginning of the answer."""
        frames: list[bytes] = []
        if self._chosen is None:
            self._chosen = self._cascade.current.serializer
            frames = self._chosen.begin()
        self._chosen.is_stopped |= self.is_stopped
        return frames + self._chosen.event(index, event)

    def end(self) -> list[bytes]:
        """Return what follows the good end."""
        assert self._chosen is not None, "an end follows events"
        return self._chosen.end()
