"""Chooses the next request to dispatch and its workers. Choices of one prompt share one prefill.
Also holds back batch streams while interactive requests wait."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from triolet.config import BACKGROUND_HOLD_S
from triolet.ids import Role
from triolet.service_class import Band, ServiceClass

from .outcome import Failure, Outcome
from .output import is_background
from .request import Phase
from .routing import Pair, Route, Why, choose_route, has_room, is_across, is_model_gone

if TYPE_CHECKING:
    from triolet.config import ServerConfig
    from triolet.service_class import Placement

    from .overload import Overload
    from .queue import FairQueue
    from .recovery import Recovery
    from .request import Attempt, Request
    from .roster import Roster, WorkerPool
    from .routing import Need
    from .workers import Worker


def fork_route(request: Request, now: float) -> Route | None:
    """Return a route to the running choice with a prompt that a request can share, or None.

    A suspected poison prompt runs alone: a fork and its origin would otherwise crash the same
    worker.
    """
    origin = None if request.origin is None else request.origin.attempt
    if origin is None or request.faults or request.poison.is_of_prompt:
        return None
    decode = origin.pair.decode
    if not decode.is_usable or request.fingerprint not in ("", decode.fingerprint):
        return None
    if not request.spec.scheduling.placement.admits(*decode.site):
        return None
    route = Route(Pair(decode, decode), 1, (Why.FORK, Why.FORK), origin.key)
    need = need_on(route, request.need)
    if request.poison.isolated or not has_room(decode, need, now):
        return None
    return route


def need_on(route: Route, need: Need) -> Need:
    """Return what a request needs on a route. A fork needs only its own blocks and computes only
    the prompt's last token."""
    capacity = route.pair.decode.capacity
    assert capacity is not None, "an attempt goes to welcomed workers only"
    if route.fork_of is None:
        return need
    num_shared = (need.prompt_tokens - 1) // capacity.block_size
    own_tokens = need.kv_tokens - num_shared * capacity.block_size
    return need._replace(prompt_tokens=1, kv_tokens=own_tokens, chain=None)


def note_no_fork(request: Request, attempt: Attempt) -> None:
    """Record that decode lacks the prompt that an attempt was to share. The request stops
    trying to share, unless its origin has moved to another worker."""
    origin = None if request.origin is None else request.origin.attempt
    if origin is None or origin.key == attempt.fork_of:
        request.origin = None


HANDOVER_TRUST: Final = 0.2
"""Weight of the latest KV transfer in the expected handover time."""


class PickNext:
    """Picks the next dispatches from one queue.

    Args:
      config: which workers may compute prompts.
      roster: the fleet's workers, shared with `Requests`.
      queue: the waiting requests.
      recovery: the record of faults.
      overload: returns the share of each worker that is reserved for others than a class.
    """

    def __init__(
        self,
        config: ServerConfig,
        roster: Roster,
        queue: FairQueue[Request],
        recovery: Recovery,
        overload: Overload,
    ) -> None:
        self._routing = config.routing
        self._zone = config.zone
        self._roster = roster
        self._queue = queue
        self._recovery = recovery
        self._overload = overload
        self._handover_s = 0.0
        # Within one call of `next`: workers that an earlier request waits for.
        self._claimed: set[Worker] = set()

    def handed_over(self, took_s: float) -> None:
        """Learn from a KV transfer: the seconds from the first token until decode had the KV."""
        self._handover_s += HANDOVER_TRUST * (took_s - self._handover_s)

    def next(self, now: float) -> tuple[Request, Route | Failure] | None:
        """Return the request that leaves the queue now, with its workers or its failure.

        A request that does not fit holds up those behind it, except on workers that it may not use.
        """
        queue = self._queue
        blocked: set[Placement] = set()
        try:
            request = queue.first()
            while request is not None:
                turn = self._turn_of(request, now)
                if turn is not None:
                    return request, turn
                placement = request.spec.scheduling.placement
                if self._waits_for_isolation(self._need(request, now), now):
                    queue.set_aside(request)
                    request = queue.first(blocked)
                elif queue.lets_pass(request, blocked):
                    request = queue.first(blocked, is_aged_too=False)
                elif len(queue.placements) > len(blocked) + 1:
                    blocked.add(placement)
                    self._claimed.update(self._roster.pool(placement, is_overflow=False).workers)
                    request = queue.first(blocked)
                else:
                    return None
        finally:
            self._claimed.clear()
            queue.restore()
        return None

    def _turn_of(self, request: Request, now: float) -> Route | Failure | None:
        """Return the workers or the failure of the first request; None if it must wait."""
        if self._recovery.awaits_answer(request, now):
            return None
        need = self._need(request, now)
        route = fork_route(request, now) or self._route(need, now)
        if route is not None:
            return self._recovery.objection_to(request.spec, now) or route
        if is_model_gone(self._roster.pool(need.placement).workers, need, self._routing):
            return Outcome.NO_WORKER.failure(
                "the model was replaced while this request ran; send it again"
            )
        return None

    def _need(self, request: Request, now: float) -> Need:
        """Return what a waiting request needs of workers now."""
        own = request.spec.scheduling.service_class
        kept_share, band = (
            self._overload.kept_share(own, now),
            Band(own, self._queue.is_over_share(request)),
        )
        return request.need._replace(
            kept_share=kept_share, band=band, home_zone=self._zone, claimed=self._claimed
        )

    def _waits_for_isolation(self, need: Need, now: float) -> bool:
        """Return whether there is room for it unless it may crash workers."""
        freely = need._replace(is_isolated=False, is_suspect=False)
        return freely != need and self._route(freely, now) is not None

    def _route(self, need: Need, now: float) -> Route | None:
        paths, routing = self._recovery.paths, self._routing
        for is_overflow in (False, True):
            pool = self._roster.pool(need.placement, is_overflow=is_overflow)
            for workers in (self._roster.candidates(pool, need), pool.workers):
                route = choose_route(workers, need, paths, routing, self._handover_s, now)
                if workers is pool.workers or self._is_typical(route, pool, now):
                    break
            if route is not None or not need.placement.has_overflow:
                return route
        return None

    def _is_typical(self, route: Route | None, pool: WorkerPool, now: float) -> bool:
        """Return whether a route found among a few workers is good enough. If not, all workers are
        compared: others may have room, a prefill worker, or a KV path within a zone."""
        if route is None:
            return False
        decode, prefill = route.pair
        is_far = is_across(prefill, decode) and (Role.PREFILL, decode.site.zone) in pool.of_zone
        is_makeshift = route.why[1] in (Why.SHORT, Why.NO_PREFILL) and pool.of_role[Role.PREFILL]
        return not (is_far or is_makeshift or self._recovery.paths.is_broken(prefill, decode, now))


_BEFORE_FIRST_TOKEN: Final = (Phase.QUEUED, Phase.RESERVING, Phase.PREFILLING)


class Background:
    """Batch streams that are held back while interactive requests wait.

    Args:
      queue: the completions' queue. Embedding inputs have another one: thousands may wait there,
        and every token of a batch stream would scan all of them.

    Attributes:
      held: the held streams, with the time of the first sweep since.
    """

    def __init__(self, queue: FairQueue[Request]) -> None:
        self._queue = queue
        self.held: dict[Request, float | None] = {}

    def is_urgent(self) -> bool:
        """Return whether an interactive request waits for its first token. One that waits for a
        limit of its tenant does not count: held streams would not help it."""
        return any(
            request.phase in _BEFORE_FIRST_TOKEN
            and not is_background(request.spec)
            and not self._queue.is_held(request)
            for request in self._queue.live()
        )

    def hold_s(self) -> float:
        """Return the longest time [s] that a batch request may be held: inf while its class is
        paused, `BACKGROUND_HOLD_S` while interactive requests wait, else 0."""
        if self._queue.classes[ServiceClass.BATCH].is_paused:
            return math.inf
        return BACKGROUND_HOLD_S if self.is_urgent() else 0.0

    def holds(self, request: Request) -> bool:
        """Return whether a batch stream gets no credit for now; it is held from then on."""
        if not self.is_urgent():
            return False
        self.held.setdefault(request, None)
        return True

    def released(self, now: float) -> list[Request]:
        """Return the streams that may continue: all once no interactive request waits, and each
        after `BACKGROUND_HOLD_S`, because others may wait for its row and blocks."""
        if self.held and not self.is_urgent():
            released = list(self.held)
        else:
            released = []
            for request, since in self.held.items():
                if since is None:
                    self.held[request] = now
                elif now - since >= BACKGROUND_HOLD_S:
                    released.append(request)
        for request in released:
            del self.held[request]
        return released
