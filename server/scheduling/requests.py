"""All requests of one server, from submission to the one terminal event, over all their attempts.

Decides everything and does nothing: frames, times and calls come in, frames to send pile up in the
outbox.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from transport.frames import (
    Embedded,
    Ended,
    FirstToken,
    Grant,
    Refuse,
    Tokens,
    WorkerHeartbeat,
)
from transport.liveness import PeerEvent, PeerState, SelfFence
from triolet.errors import draining
from triolet.ids import new_secret

from . import outcome
from .admission import AdmissionAsk, limits_of
from .attempt import Attempts, SweepTimes, due_at
from .frames import Again, FrameFault, FrameOutbox
from .outcome import Outcome
from .pick_next import Background
from .request import Phase, RequestTable
from .routing import is_ready

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence, Set

    from transport.frames import AnyFrame, Welcome
    from triolet.config import ServerConfig
    from triolet.errors import RequestError
    from triolet.ids import AttemptKey

    from ..contract.generation import CancelReason, GenerationRequest
    from ..contract.request_events import RequestEvents
    from .output import RelayText
    from .request import Request
    from .status import Observer
    from .workers import Worker


OWN_PAUSE: Final = "server_paused"
FAREWELL: Final = "farewell"
"""A worker left by itself: what it was given meanwhile goes elsewhere, and no fault is counted."""
NO_DEATH: Final = frozenset({"silent", "link_full", "protocol"})
"""Causes of a loss for which no request is suspected. A process that dies closes its links: one
that is only silent was stopped, or cut off. A GOODBYE that is no farewell is not among them: from
a worker with attempts it means that a new life answers at its address."""
INPUTS_PER_TURN: Final = 16
"""Inputs of one request before others have theirs: a single query overtakes a request of
thousands."""


class Requests:
    """All requests of one server.

    Args:
      config: bounds and deadlines.
      workers: every worker that is a member, or was and still has attempts.
      text: for the relays.
      observer: told of what happens.
      now: the time of its start.
      events: publishes the lives of requests.
      kv_secret: from which the keys of attempts' KV are made; None draws one.

    Attributes:
      outbox: frames to send.
      admission: decides what is taken on.
      recovery: the memory of faults.
      background: streams held for others.
      table: of the requests that are live.
      queues: of all that wait: for tokens, and for vectors.
      sweep_times: when `sweep` is to be called; see `is_restless`.
    """

    def __init__(
        self,
        config: ServerConfig,
        workers: Sequence[Worker],
        text: RelayText,
        observer: Observer,
        now: float,
        events: RequestEvents,
        kv_secret: bytes | None = None,
    ) -> None:
        self.outbox = FrameOutbox()
        self._config = config
        self._workers = workers
        self._observer = observer
        self.table = RequestTable(config, text, events)
        self._attempts = Attempts(
            config,
            self._workers,
            self.table,
            self.outbox,
            text.eos_token_ids,
            observer,
            now,
            new_secret() if kv_secret is None else kv_secret,
        )
        self.background = Background(self._attempts.queue)
        self.admission = self._attempts.admission
        self.recovery = self._attempts.recovery
        self.queues = (self._attempts.queue, self._attempts.inputs)
        self._drain_until: float | None = None
        self._fence: SelfFence | None = None
        self.sweep_times = SweepTimes(config, now)

    @property
    def num_queued(self) -> int:
        """Requests that wait for workers."""
        return sum(len(queue) for queue in self.queues)

    @property
    def num_in_flight(self) -> int:
        """Requests without a terminal event, the waiting ones included."""
        return len(self.table)

    @property
    def is_restless(self) -> bool:
        """Whether what a sweep looks for may come at any time, so that none may be left out."""
        return any(self.queues) or bool(self.background.held) or self.is_draining

    @property
    def max_model_len(self) -> int:
        """The longest prompt and completion together."""
        return limits_of(self._workers, self.table.text.max_model_len).max_model_len

    @property
    def is_draining(self) -> bool:
        """Whether nothing new is taken."""
        return self._drain_until is not None

    def note_pause(self, now: float) -> bool:
        """Take back the time in which this process stood still, and return whether it did; called
        first in every turn.

        It must not be taken for the silence of workers, nor may leases go on that were not renewed.
        """
        if self._fence is None:
            # A worker's last renewal may be one heartbeat older than the standstill.
            link = self._config.link
            limit_s = link.lease_ttl_s - link.heartbeat_interval_s
            self._fence = SelfFence(link, now, limit_s)
        is_fenced = self._fence.beat(now)
        pause_s = self._fence.absence_s
        if not pause_s:
            return False
        self._observer.server_paused(pause_s)
        for request in self.table:
            request.discount(pause_s)
        for worker in self._workers:
            worker.discount(pause_s)
        if is_fenced:
            self._attempts.begin_anew(OWN_PAUSE, now)
        return True

    def submit(
        self, specs: Iterable[GenerationRequest], now: float, *, first: int = 0
    ) -> list[Request]:
        """Accept requests, all of them or none; each returned one gets its events.

        Args:
          specs: the requests.
          now: the time.
          first: place of the first one among the inputs of its client's request.

        Raises:
          RequestError: one was refused, and nothing was begun.
        """
        specs = tuple(specs)
        taken = []
        forecasts = self.admission.admit(AdmissionAsk.of(specs), now).forecasts
        for at, (spec, forecast) in enumerate(zip(specs, forecasts, strict=True), first):
            turn = at // INPUTS_PER_TURN if forecast is None else 0
            request = self.table.accept(spec, now, turn=turn)
            if forecast is not None:
                request.forecast = forecast
                self.admission.overload.took(forecast, now)
                if not self._attempts.queue:
                    self.admission.overload.prediction.advance(now, is_waiting=False)
            self.sweep_times.note(request.deadline)
            self.recovery.budget.earn()
            self._attempts.queue_of(request).add(request, request.place)
            taken.append(request)
        self._attempts.dispatch(now)
        return taken

    def cancel(self, requests: Iterable[Request], reason: CancelReason, now: float) -> None:
        """End requests from outside. Idempotent."""
        self.end(requests, outcome.cancelled(reason, self._config), now)

    def cancel_tenants(self, tenants: Set[str], now: float) -> None:
        """End all requests of tenants that were disabled or removed."""
        failure = Outcome.DISMISSED.failure(
            "the tenant of this request was disabled or removed while it ran"
        )
        ended = [one for one in self.table if one.spec.scheduling.tenant in tenants]
        self.end(ended, failure, now)

    def end(self, requests: Iterable[Request], failure: outcome.Failure, now: float) -> None:
        """End requests that are live in one way. Idempotent."""
        for request in requests:
            if request.phase is not Phase.FINISHED:
                self._attempts.fail(request, failure, now)
        self._attempts.dispatch(now)

    def taken(self, request: Request, *, is_released: bool = False) -> bool:
        """Note that its reader has taken tokens, which makes room for as many more; of one that
        stands still for others, that it goes on. Return whether credit is to be sent now."""
        if request.is_background and not is_released and self.background.holds(request):
            return False  # until a sweep releases it
        window = request.window
        request.allowed = request.output.num_taken + window
        attempt = request.attempt
        # A quarter at a time: a frame per token would cost more than the token.
        if attempt is None or request.allowed - attempt.allowed < max(window // 4, 1):
            return False
        # Streams that have taken half of that join, and from then on they need one frame together.
        decode = attempt.pair.decode
        for key in decode.shares:
            other = self.table.of_attempt(*key)
            if other is None or other.attempt is None:
                continue
            if other.allowed - other.attempt.allowed >= max(window // 8, 1):
                other.attempt.allowed = other.allowed
                self.outbox.allow(decode, key, other.allowed, len(other.relay.token_ids))
        return True

    def welcomed(self, worker: Worker, welcome: Welcome, now: float) -> None:
        """Take in that a worker answered our HELLO, perhaps in a new life."""
        if worker.monitor.epoch != welcome.peer.epoch:
            self.lost(worker, "restarted", now)
        away_s = worker.monitor.silence_s(now) if worker.is_missed else None
        worker.welcomed(welcome, now)
        self._attempts.note_pools()
        self._observer.worker_joined(str(worker), away_s)

    def lost(self, worker: Worker, cause: str, now: float) -> None:
        """Take in that a worker is gone; what it had goes elsewhere. Idempotent."""
        if worker.missing_since is not None:
            return
        left = cause == FAREWELL
        worker.lost(now, is_its_fault=not left)
        worker.is_missed = not left
        self._attempts.note_pools()
        struck = [request for request in self.table if request.needs(worker)]
        self._observer.worker_lost(str(worker), cause, len(struck))
        has_died = not left and cause not in NO_DEATH
        suspects = {s for s in struck if s.computes_on(worker)} if has_died else set()
        if cause == PeerEvent.WEDGED.value:
            # A request that came when it stood still already did not cause that.
            since = now - self._config.link.progress_timeout_s
            suspects = {s for s in suspects if s.began_before(since)}
        # What is quarantined by this first: the others are told that they did not cause it.
        struck.sort(key=lambda request: not request.poison.isolated)
        for request in struck:
            num_suspects = len(suspects) if request in suspects else 0
            # Its breaker knows: `Worker.lost` told it.
            fault = FrameFault(
                worker.role, is_workers=False, is_shared=True, num_suspects=num_suspects
            )
            again = Again(f"{worker.role}_left") if left else Again(f"{worker.role}_lost", fault)
            self._attempts.apply(request, again, now)
        self._attempts.dispatch(now)

    def forget(self, worker: Worker, now: float) -> None:
        """Take in that a worker without attempts is no member any more."""
        self.lost(worker, FAREWELL, now)
        self.recovery.forget(worker)

    def received(self, worker: Worker, frame: AnyFrame, now: float) -> bool:
        """Take in a frame of a worker that was greeted. What belongs to no present attempt is
        dropped: it is late, doubled, or from an attempt that was given up.

        Returns:
          Whether something may follow for workers. Nothing does from tokens with which no attempt
          begins to decode or ends.
        """
        if not worker.monitor.heard(now):
            self._observer.frames_dropped("not_greeted")
            return False
        match frame:
            case WorkerHeartbeat(load=load):
                before = None if worker.beat is None else worker.beat.load
                if not worker.heartbeat(frame, now):
                    self.lost(worker, "another_life", now)
                    return True
                self.recovery.answered(worker, now)
                if before is not None:
                    num_tokens = load.computed_tokens - before.computed_tokens
                    self._observer.worker_stepped(load.steps - before.steps, num_tokens)
            case Tokens(rows=rows):
                if not self._attempts.take_rows(worker, rows, now):
                    return False
            case Grant() | Refuse() | FirstToken() | Embedded() | Ended():
                self._attempts.take_answer(worker, frame, now)
            case _:
                # Not for a server: another program, or a bug over there.
                self.lost(worker, "protocol", now)
        self._attempts.dispatch(now)
        return True

    def sweep(self, now: float) -> None:
        """Look for whatever time alone brings about."""
        # A queue in front of absent workers says nothing of how fast they are.
        is_able = is_ready(self._workers, self._config.routing, now)
        self.admission.sweep(now, is_able=is_able)
        for queue in self.queues:
            queue.pause(self.admission.paused)
        self.recovery.sweep(now)
        for worker in self._workers:
            if worker.monitor.check(now) is PeerState.DEAD:
                self.lost(worker, worker.monitor.reason.value, now)
            self.sweep_times.note(worker.monitor.due_at)
        for request in self.table.next_swept():
            due = due_at(request, self._config)
            if due <= now or self.is_draining:
                self._attempts.sweep(request, self._drain_until, now)
                due = max(now, due_at(request, self._config))
            self.sweep_times.note(due)
        self.sweep_times.swept(now, is_round_over=not self.table.has_unswept)
        for request in self.background.released(now):
            self.taken(request, is_released=True)
        self._attempts.end_without_workers(now)
        self._attempts.dispatch(now)

    def begin_drain(self, now: float, refusal: Callable[[], RequestError] = draining) -> None:
        """Refuse what is new; what runs may finish until `drain_timeout_s`. Idempotent.

        Args:
          now: the time.
          refusal: makes the error of what is refused, and of what runs longer.
        """
        if self._drain_until is None:
            self._drain_until = now + self._config.drain_timeout_s
            self.admission.is_draining, self.admission.refusal = True, refusal

    def check_accounting(self) -> None:
        """Raise unless every request has or will have exactly one terminal event.

        Raises:
          LocalProtocolError: it does not add up.
        """
        self.table.accounting.check(self.num_in_flight)

    def is_wanted(self, worker: Worker, key: AttemptKey) -> bool:
        """Return whether a request in flight has this as its present attempt, on this worker."""
        request = self.table.of_attempt(*key)
        attempt = None if request is None else request.attempt
        return attempt is not None and worker in attempt.pair
