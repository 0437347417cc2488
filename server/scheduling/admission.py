"""Admission control: accepts or refuses new requests. A refusal carries the client's error and its
Retry-After."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from triolet.errors import RequestError, crowded_out, draining, invalid_request, server_error
from triolet.ids import Role
from triolet.service_class import ANYWHERE, ServiceClass
from triolet.units import SECONDS

from . import outcome
from .overload import Demand, Overload
from .presence import Presence
from .queue import UNKNOWN_TOKENS, QueuePlace, effective_place, effective_scheduling
from .routing import needed_roles
from .wait_estimate import FleetCapacity

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from triolet.config import ServerConfig
    from triolet.service_class import Placement, Scheduling

    from ..contract.generation import GenerationRequest
    from .queue import FairQueue
    from .recovery import Recovery
    from .request import Request, RequestTable
    from .roster import AdmissionLimits, Roster, WorkerPool
    from .status import OverloadObserver
    from .wait_estimate import Forecast
    from .workers import Worker

FULL_RETRY_S: Final = 2 * SECONDS
"""Retry-After when the queue is full: time enough for it to move."""
FULL_INPUTS_RETRY_S: Final = 1 * SECONDS
"""Retry-After when the queue of embedding inputs is full; these take no decode rows."""
DRAW_BYTES: Final = 4
"""Bytes of the request's random id that serve as its random draw for early refusals."""
LEAST_TOKENS: Final = 1
"""Prompt tokens assumed before tokenization, and for a choice that shares another's prompt."""


class AdmissionAsk(NamedTuple):
    """A question to admission: requests that arrive together, or one before tokenization.

    Attributes:
      scheduling: tenant and service class.
      deadline_s: seconds within which all requests must be done.
      request_id: the first request's random id.
      key: identifies the content, the same on a resend; 0 if unknown.
      requests: the requests; empty before tokenization.
    """

    scheduling: Scheduling
    deadline_s: float
    request_id: bytes
    key: int = 0
    requests: tuple[GenerationRequest, ...] = ()

    @property
    def is_silent(self) -> bool:
        """Whether its requests are silent; those that arrive together are all, or none."""
        return bool(self.requests) and self.requests[0].is_silent

    @classmethod
    def of(cls, requests: tuple[GenerationRequest, ...]) -> AdmissionAsk:
        """Return the question for one or more requests that arrive together."""
        first = requests[0]
        return cls(first.scheduling, first.deadline_s, first.request_id, first.key, requests)


class Admit(NamedTuple):
    """All requests are accepted.

    Attributes:
      forecasts: one forecast per request in order; None for an embedding input and for a silent
        request, which has no expected wait and does not count as load.
    """

    forecasts: tuple[Forecast | None, ...]


class Refusal(NamedTuple):
    """All requests are refused.

    Attributes:
      error: the client's error, with a Retry-After where a retry makes sense.
    """

    error: RequestError


class Admission:
    """Decides which requests this server accepts.

    Args:
      config: bounds, and which mechanisms are enabled.
      roster: the fleet's workers, shared with `Requests`.
      queues: the queues of completions and of embedding inputs.
      table: live requests; counts refusals.
      recovery: the record of past faults.
      observer: receives refusals and brownout levels.

    Attributes:
      overload: decides by expected wait.
      is_draining: new requests are refused.
      refusal: makes the error for requests refused, or cut off, while draining.
      presence: whether workers start when requests need them.
    """

    def __init__(
        self,
        config: ServerConfig,
        roster: Roster,
        queues: tuple[FairQueue[Request], FairQueue[Request]],
        table: RequestTable,
        recovery: Recovery,
        observer: OverloadObserver,
        now: float,
    ) -> None:
        self.overload = Overload(config.overload, observer, now, config.routing.overtaken_s)
        self.is_draining = False
        self.refusal: Callable[[], RequestError] = draining
        self.presence = Presence()
        self._config = config
        self._roster = roster
        self._queue, self._inputs = queues
        self._table = table
        self._recovery = recovery
        self._swept_at = now

    def decide(self, ask: AdmissionAsk, now: float) -> Admit | Refusal:
        """Decide about requests that arrive together: all or none. Changes nothing except the
        record of refused requests.

        Args:
          ask: the question; without requests, only the expected wait is checked.
        """
        texts = tuple(request for request in ask.requests if request.form is None)
        inputs = tuple(request for request in ask.requests if request.form is not None)
        try:
            self._check(ask.requests, now)
            if inputs:
                self._check_inputs(inputs, now)
            if texts:
                self._check_texts(texts, now)
            is_unforeseen = ask.is_silent or (inputs and not texts)
            forecasts = iter(() if is_unforeseen else self._forecasts(ask, texts, now))
        except RequestError as error:
            return Refusal(error)
        # None is left for requests that need none.
        return Admit(tuple(next(forecasts, None) if r.form is None else None for r in ask.requests))

    def admit(self, ask: AdmissionAsk, now: float) -> Admit:
        """Accept requests, and count refusals (one if the ask has no requests).

        Raises:
          RequestError: refused.
        """
        decision = self.decide(ask, now)
        if isinstance(decision, Refusal):
            for _ in ask.requests or (ask,):
                self._table.reject(ask.scheduling, decision.error, is_silent=ask.is_silent)
            raise decision.error
        return decision

    def would_refuse(self, ask: AdmissionAsk, now: float) -> bool:
        """Return whether a request would be refused whatever its prompt. Has no side effects."""
        place, demand = _unread(ask, now)
        is_under = is_under_share(self._queue, [place])
        ahead = self._scaled(self._queue.tokens_ahead(place), place.scheduling.placement)
        whole = demand._replace(together_tokens=demand.num_tokens, is_under_share=is_under)
        return bool(self.overload.look(whole, ahead, now).refused_for)

    def max_tokens(self, scheduling: Scheduling, prompt_tokens: int) -> int | None:
        """Return the current limit on the tokens of an answer; None for no limit. Tenants below
        their share or with their own pool have no limit."""
        if scheduling.placement.pools or is_under_share(
            self._queue, [QueuePlace(scheduling, 0, 0.0, 0, prompt_tokens, UNKNOWN_TOKENS)]
        ):
            return None
        return self.overload.brownout.max_tokens(scheduling.service_class)

    @property
    def level(self) -> int:
        """The brownout level, 0 to 4."""
        return int(self.overload.brownout.level)

    @property
    def paused(self) -> Collection[ServiceClass]:
        """Service classes that are paused now."""
        return (ServiceClass.BATCH,) if self.overload.brownout.pauses_batch else ()

    def sweep(self, now: float, *, is_able: bool) -> None:
        """Advance to `now`. `is_able`: some worker could take the waiting requests."""
        elapsed_s, self._swept_at = now - self._swept_at, now
        if not is_able:
            self.overload.idle_s += elapsed_s
        is_waiting = is_able and any(one.is_waiting for one in self._queue.classes)
        self.overload.prediction.advance(now, is_waiting=is_waiting)
        self.overload.sweep(_capacity(self._roster.workers), self._tokens_waiting, now)

    def _check(self, requests: tuple[GenerationRequest, ...], now: float) -> None:
        """Raise for a request that must not start, whatever it asks for."""
        if requests and self.is_draining:
            raise self.refusal()
        for request in requests:
            if request.request_id in self._table:
                raise server_error()  # two requests with one id would be indistinguishable
            objection = self._recovery.objection_to(request, now)
            if objection is not None:
                raise objection.error

    def _check_texts(self, requests: tuple[GenerationRequest, ...], now: float) -> None:
        """Raise for a completion that cannot run, or for which the queue has no room."""
        placement = requests[0].scheduling.placement
        pool = self._roster.pool(placement)
        roles, most = needed_roles(self._config.routing), self._config.max_queued_requests
        for request in requests:
            refuse_unfit(request, pool.limits)
            self._check_workers(pool, roles, placement, request.deadline_s, now)
            # The queue takes memory, however quickly it drains.
            if num_queued := num_crowding(self._queue, request.scheduling, len(requests), most):
                raise crowded_out(f"{num_queued} requests wait already", FULL_RETRY_S)

    def _check_inputs(self, requests: tuple[GenerationRequest, ...], now: float) -> None:
        """Raise for an input that is too long, or for which the queue has no room."""
        placement = requests[0].scheduling.placement
        pool = self._roster.pool(placement)
        most_tokens = pool.limits.max_model_len
        for at, request in enumerate(requests):
            if len(request.prompt_ids) > most_tokens:
                raise invalid_request(
                    f"input {at} has {len(request.prompt_ids)} tokens; this model takes at most "
                    f"{most_tokens}",
                    "input",
                    "context_length_exceeded",
                )
        within_s = min((request.deadline_s for request in requests), default=0.0)
        self._check_workers(pool, (Role.PREFILL,), placement, within_s, now)
        most = self._config.embedding.max_waiting_inputs
        for scheduling in {request.scheduling for request in requests}:
            if num_waiting := num_crowding(self._inputs, scheduling, len(requests), most):
                raise crowded_out(f"{num_waiting} inputs wait already", FULL_INPUTS_RETRY_S)

    def _check_workers(
        self,
        pool: WorkerPool,
        roles: Collection[Role],
        placement: Placement,
        within_s: float,
        now: float,
    ) -> None:
        if self.presence.is_idle:
            self.presence.note_use()
        is_away = missing_role(pool, roles, 0.0, now) is not None
        if is_away and self.presence.require(within_s, now):
            return
        role = missing_role(pool, roles, self._config.worker_wait_s, now)
        if role is not None:
            raise outcome.no_worker_left(role, placement).error

    def _forecasts(
        self, ask: AdmissionAsk, requests: tuple[GenerationRequest, ...], now: float
    ) -> list[Forecast]:
        """Return a forecast for each request; raise RequestError if one would be too late."""
        asked = [(_place(request, now), _demand(request)) for request in requests]
        if not asked:
            asked.append(_unread(ask, now))
        is_under = is_under_share(self._queue, [place for place, _ in asked])
        together_tokens = sum(demand.num_tokens for _, demand in asked)
        forecasts: list[Forecast] = []
        for place, demand in asked:
            place = place._replace(prompt_tokens=demand.num_tokens)
            ahead = self._scaled(self._queue.tokens_ahead(place), place.scheduling.placement)
            whole = demand._replace(together_tokens=together_tokens, is_under_share=is_under)
            forecast = self.overload.judge(whole, ahead, now)
            # One answer holds all choices: it starts with the first, and the others may take as
            # long.
            forecasts.append(forecast.of_later_choice(place.due) if forecasts else forecast)
        return forecasts

    def _tokens_waiting(self, service_class: ServiceClass) -> float:
        """Return the prompt tokens of this and higher classes that wait for the shared pool."""
        classes = self._queue.classes[: service_class + 1]
        tokens = sum(one.ready_tokens(ANYWHERE) for one in classes if not one.is_paused)
        return self._scaled(tokens, ANYWHERE)

    def _scaled(self, tokens: float, placement: Placement) -> float:
        """Return how many tokens all workers compute in the time in which a placement's workers
        compute these."""
        everyone = self._roster.workers
        workers = self._roster.pool(placement).workers if tokens else everyone
        if len(workers) == len(everyone):
            return tokens
        own, whole = _capacity(workers).tokens_per_s, _capacity(everyone).tokens_per_s
        return tokens * whole / own if own else tokens


def is_under_share(queue: FairQueue[Any], places: Iterable[QueuePlace]) -> bool:
    """Return whether a tenant is so far below its share that other tenants should yield to its new
    requests. False for the only tenant.

    Args:
      queue: the waiting requests.
      places: places of requests that arrive together, of one tenant and class.
    """
    places = [effective_place(queue.config, place) for place in places]
    scheduling = places[0].scheduling
    one = queue.classes[scheduling.service_class]
    has_others = len(one) > (one.find(scheduling.claimant) is not None)
    cost = sum(queue.cost_of(place) for place in places)
    return has_others and one.head_start_of(scheduling, cost) > 0.0


def num_crowding(queue: FairQueue[Any], scheduling: Scheduling, count: int, most: int) -> int:
    """Return how many requests of this and higher classes wait for the same workers if `count` more
    would be too many, else 0. The bound is `most`; a tenant always has room up to its share of
    `most` by weight, and so has everyone while none waits."""
    scheduling = effective_scheduling(queue.config, scheduling)
    classes = queue.classes[: scheduling.service_class + 1]
    num_before = sum(one.num_waiting for one in classes)
    if len(queue.placements) > 1:
        waiting = [one for of_class in classes for one in of_class if one]
        num_before = sum(len(q) for q in waiting if q.placement.meets(scheduling.placement))
    if num_before + count <= most:
        return 0
    num_own = sum(len(one.find(scheduling.claimant) or ()) for one in classes)
    part = queue.usages.part(scheduling.claimant, scheduling.weight)
    return num_before if num_own + count > most * part else 0


def _unread(ask: AdmissionAsk, now: float) -> tuple[QueuePlace, Demand]:
    """Return the minimal demand of a request that is not tokenized yet."""
    place = QueuePlace(ask.scheduling, 0, now + ask.deadline_s, 0, LEAST_TOKENS, UNKNOWN_TOKENS)
    draw = _draw(ask.request_id)
    demand = Demand(ask.scheduling, LEAST_TOKENS, ask.deadline_s, ask.key, draw, is_unread=True)
    return place, demand


def missing_role(pool: WorkerPool, roles: Iterable[Role], wait_s: float, now: float) -> Role | None:
    """Return a role that no worker has filled for `wait_s`, the time that a restart takes."""
    for role in roles:
        members = pool.of_role[role]
        if any(worker.missing_since is None for worker in members):
            continue
        gone = [at for worker in members if (at := worker.missing_since) is not None]
        if not gone or now - max(gone) >= wait_s:
            return role
    return None


def refuse_unfit(request: GenerationRequest, limits: AdmissionLimits) -> None:
    """Raise for a request that can never run, even on idle workers.

    Raises:
      RequestError: 400, with the numbers.
    """
    prompt_tokens = len(request.prompt_ids)
    max_tokens = request.sampling.max_tokens
    if prompt_tokens == 0:
        raise invalid_request("the prompt is empty; at least one token is needed", "prompt")
    if prompt_tokens + max_tokens > limits.max_model_len:
        raise invalid_request(
            f"{prompt_tokens} prompt tokens and max_tokens = {max_tokens} make "
            f"{prompt_tokens + max_tokens}; the context of this model is {limits.max_model_len} "
            "tokens",
            "prompt" if prompt_tokens >= limits.max_model_len else "max_tokens",
            "context_length_exceeded",
        )
    # The last token's KV is never needed.
    kv_tokens = prompt_tokens + max_tokens - 1
    if limits.pool_tokens is not None and kv_tokens > limits.pool_tokens:
        raise invalid_request(
            f"{prompt_tokens} prompt tokens and max_tokens = {max_tokens} need KV for {kv_tokens} "
            f"tokens; the largest decode pool holds {limits.pool_tokens}",
            "max_tokens",
            "context_length_exceeded",
        )
    if limits.prefill_pool_tokens is not None and prompt_tokens > limits.prefill_pool_tokens:
        raise invalid_request(
            f"a prompt of {prompt_tokens} tokens does not fit; the largest prefill pool holds "
            f"{limits.prefill_pool_tokens}",
            "prompt",
            "context_length_exceeded",
        )


def _place(request: GenerationRequest, now: float) -> QueuePlace:
    num_tokens, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
    due = now + request.deadline_s
    return QueuePlace(request.scheduling, request.priority, due, 0, num_tokens, max_tokens)


def _demand(request: GenerationRequest) -> Demand:
    num_tokens = LEAST_TOKENS if request.origin_id else len(request.prompt_ids)
    key = request.key or hash((request.scheduling.tenant, request.prompt_ids))
    return Demand(
        request.scheduling, num_tokens, request.deadline_s, key, _draw(request.request_id)
    )


def _draw(request_id: bytes) -> float:
    return int.from_bytes(request_id[:DRAW_BYTES], "big") / 256**DRAW_BYTES


def _capacity(workers: Iterable[Worker]) -> FleetCapacity:
    usable = [worker for worker in workers if worker.is_usable]
    prefills = [worker for worker in usable if worker.role is Role.PREFILL]
    decodes = [worker for worker in usable if worker.role is Role.DECODE]
    rates = [worker.load.prompt_tokens_per_s for worker in prefills or decodes]
    return FleetCapacity(
        rows=sum(worker.beat.row_credit for worker in decodes if worker.beat is not None),
        tokens_per_s=sum(rates),
        fastest_tokens_per_s=max(rates, default=0.0),
        foreign_tokens=sum(worker.foreign_tokens for worker in prefills),
    )
