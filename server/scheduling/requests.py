"""The scheduler's core: follows every request of one server from submission over all its attempts
to its one terminal event.

Pure decisions, no I/O: frames, times and calls come in, and outgoing frames wait in the outbox.
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
from .admission import AdmissionAsk
from .attempt import Attempts, SweepTimes, due_at
from .frames import Again, FrameFault, FrameOutbox
from .outcome import Outcome
from .pick_next import Background
from .request import Phase, RequestTable
from .routing import is_ready

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Set

    from transport.frames import AnyFrame, Welcome
    from triolet.config import ServerConfig
    from triolet.errors import RequestError
    from triolet.ids import AttemptKey

    from ..contract.generation import CancelReason, GenerationRequest
    from ..contract.request_events import RequestEvents
    from .output import RelayText
    from .request import Request
    from .roster import Roster
    from .status import Observer
    from .workers import Worker


OWN_PAUSE: Final = "server_paused"
FAREWELL: Final = "farewell"
"""A worker left in order: its attempts move elsewhere and no fault is counted."""
NO_DEATH: Final = frozenset({"silent", "link_full", "protocol"})
"""Causes of a loss for which no request is suspected. A process that dies closes its connections;
one that is only silent was paused or cut off. A GOODBYE that is no farewell is not listed: from a
worker with attempts it means that a restarted worker answers at its address."""
INPUTS_PER_TURN: Final = 16
"""Inputs of one request taken before others have their turn, so that a single query overtakes a
request of thousands."""


class Requests:
    """All requests of one server.

    Args:
      config: bounds and deadlines.
      roster: members, and former members that still have attempts.
      text: the model's tokenizer.
      observer: receives events.
      events: publishes request events.
      kv_secret: secret from which each attempt's KV key is derived; None draws one.

    Attributes:
      outbox: frames to send.
      admission: accepts or refuses requests.
      recovery: the record of faults.
      background: batch streams that are held back.
      table: the live requests.
      queues: the queues of completions and of embedding inputs.
      sweep_times: when to call `sweep`; see `is_restless`.
    """

    def __init__(
        self,
        config: ServerConfig,
        roster: Roster,
        text: RelayText,
        observer: Observer,
        now: float,
        events: RequestEvents,
        kv_secret: bytes | None = None,
    ) -> None:
        self.outbox = FrameOutbox()
        self._config = config
        self._roster = roster
        self._observer = observer
        self.table = RequestTable(config, text, events)
        self._attempts = Attempts(
            config,
            roster,
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
        """Number of requests that wait for workers."""
        return sum(len(queue) for queue in self.queues)

    @property
    def num_in_flight(self) -> int:
        """Number of requests without a terminal event, waiting or running."""
        return len(self.table)

    @property
    def is_restless(self) -> bool:
        """Whether work for a sweep may appear at any time, so that no sweep may be skipped."""
        return any(self.queues) or bool(self.background.held) or self.is_draining

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and completion together."""
        return self._roster.pool(None).limits.max_model_len

    @property
    def is_draining(self) -> bool:
        """Whether no new requests are accepted."""
        return self._drain_until is not None

    def note_pause(self, now: float) -> bool:
        """Detect a pause of this process and exclude it from all timeouts; return whether there was
        one. Call it first in every turn.

        A pause must not count as silence of workers, and leases that were not renewed during it
        must not continue.
        """
        if self._fence is None:
            # A worker's last renewal may be one heartbeat older than the pause.
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
        for worker in self._roster.workers:
            worker.discount(pause_s)
        if is_fenced:
            self._attempts.begin_anew(OWN_PAUSE, now)
        return True

    def submit(
        self, specs: Iterable[GenerationRequest], now: float, *, first: int = 0
    ) -> list[Request]:
        """Accept requests, all or none; each returned one gets its events.

        Args:
          specs: the requests.
          first: index of the first one among the inputs of its client's request.

        Raises:
          RequestError: one was refused; nothing was started.
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
        """Cancel requests. Idempotent."""
        self.end(requests, outcome.cancelled(reason, self._config), now)

    def cancel_tenants(self, tenants: Set[str], now: float) -> None:
        """End all requests of tenants that have been disabled, removed or bound to zones."""
        failure = Outcome.DISMISSED.failure(
            "the tenant of this request was disabled, removed or bound to zones while it ran"
        )
        ended = [one for one in self.table if one.spec.scheduling.tenant in tenants]
        self.end(ended, failure, now)

    def end(self, requests: Iterable[Request], failure: outcome.Failure, now: float) -> None:
        """End live requests with the same failure. Idempotent."""
        for request in requests:
            if request.phase is not Phase.FINISHED:
                self._attempts.fail(request, failure, now)
        self._attempts.dispatch(now)

    def taken(self, request: Request, *, is_released: bool = False) -> bool:
        """Update the credit of a request after its reader took tokens, or of a held batch stream
        that is released. Return whether credit must be sent now."""
        if request.is_background and not is_released and self.background.holds(request):
            return False  # held until a sweep releases it
        window = request.window
        request.allowed = request.output.num_taken + window
        attempt = request.attempt
        # Send credit in quarters of the window: a frame per token would cost more than the token.
        if attempt is None or request.allowed - attempt.allowed < max(window // 4, 1):
            return False
        # Include streams that have taken half of that; from then on they share frames.
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
        """Record that a worker answered HELLO, perhaps after a restart."""
        if worker.monitor.epoch != welcome.peer.epoch:
            self.lost(worker, "restarted", now)
        away_s = worker.monitor.silence_s(now) if worker.is_missed else None
        worker.welcomed(welcome, now)
        self._roster.changed()
        self._attempts.note_pools()
        self._observer.worker_joined(str(worker), away_s)

    def lost(self, worker: Worker, cause: str, now: float) -> None:
        """Record that a worker is lost; its attempts are retried elsewhere. Idempotent."""
        if worker.missing_since is not None:
            return
        left = cause == FAREWELL
        worker.lost(now, is_its_fault=not left)
        worker.is_missed = not left
        self._attempts.note_pools()
        struck = [request for request in self.table if request.needs(worker)]
        self._observer.worker_lost(str(worker), cause, len(struck))
        if not left:
            self._observer.incident(worker.address)
        has_died = not left and cause not in NO_DEATH
        suspects = {s for s in struck if s.computes_on(worker)} if has_died else set()
        if cause == PeerEvent.WEDGED.value:
            # A request that arrived after the worker got stuck did not cause it.
            since = now - self._config.link.progress_timeout_s
            suspects = {s for s in suspects if s.began_before(since)}
        # Isolated requests first: they may be convicted, and the others then learn that they did
        # not cause it.
        struck.sort(key=lambda request: not request.poison.isolated)
        for request in struck:
            num_suspects = len(suspects) if request in suspects else 0
            # `Worker.lost` has already told the breaker.
            fault = FrameFault(
                worker.role, is_workers=False, is_shared=True, num_suspects=num_suspects
            )
            again = Again(f"{worker.role}_left") if left else Again(f"{worker.role}_lost", fault)
            self._attempts.apply(request, again, now)
        self._attempts.dispatch(now)

    def forget(self, worker: Worker, now: float) -> None:
        """Drop a worker without attempts that has left the fleet."""
        self.lost(worker, FAREWELL, now)
        self.recovery.forget(worker)

    def received(self, worker: Worker, frame: AnyFrame, now: float) -> bool:
        """Apply a frame of a greeted worker. A frame that belongs to no current attempt is dropped:
        it is late, duplicated, or from an attempt that was given up.

        Returns:
          Whether frames for workers may follow. None follow from tokens by which no attempt starts
          to decode or ends.
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
                # Not a frame for servers: another program, or a bug in the worker.
                self.lost(worker, "protocol", now)
        self._attempts.dispatch(now)
        return True

    def sweep(self, now: float) -> None:
        """Apply deadlines and timeouts."""
        # A queue in front of absent workers says nothing about their speed.
        is_able = is_ready(self._roster.workers, self._config.routing, now)
        self.admission.sweep(now, is_able=is_able)
        for queue in self.queues:
            queue.pause(self.admission.paused)
        self.recovery.sweep(now)
        for worker in self._roster.workers:
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
        """Refuse new requests; running ones may finish until `drain_timeout_s`, except silent ones.
        Idempotent.

        Args:
          refusal: makes the error for requests that are refused or run too long.
        """
        if self._drain_until is None:
            self._drain_until = now + self._config.drain_timeout_s
            self.admission.is_draining, self.admission.refusal = True, refusal
            silent = [one for one in self.table if one.spec.is_silent]
            self.end(silent, outcome.drained(refusal()), now)

    def check_accounting(self) -> None:
        """Raise unless every request has or will have exactly one terminal event.

        Raises:
          LocalProtocolError: the counts do not add up.
        """
        self.table.accounting.check(self.num_in_flight)

    def is_wanted(self, worker: Worker, key: AttemptKey) -> bool:
        """Return whether this is the current attempt of a live request on this worker."""
        request = self.table.of_attempt(*key)
        attempt = None if request is None else request.attempt
        return attempt is not None and worker in attempt.pair
