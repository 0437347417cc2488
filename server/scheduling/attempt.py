"""The attempts of requests: starts an attempt on its workers, applies their frames, and retries or
ends it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from transport.digest import kv_key
from transport.frames import (
    Embedded,
    End,
    Ended,
    EndReason,
    FirstToken,
    Grant,
    Refuse,
    RefuseReason,
)
from triolet.ids import AttemptKey, Role
from triolet.service_class import Band

from ..contract.request_events import AttemptFailed, FirstTokenArrived, RequestDispatched
from . import outcome
from .admission import Admission, missing_role
from .frames import (
    Again,
    Finish,
    FrameFault,
    embed_frame,
    prefill_frame,
    reserve_frame,
    take_ended,
    take_first_token,
    take_row,
)
from .outcome import Failure, Outcome
from .pick_next import PickNext, need_on, note_no_fork
from .queue import FairQueue
from .recovery import Recovery
from .request import Attempt, Phase, Step
from .routing import Pair, Route, blocks_needed, counted_tokens, needed_roles, tokens_to_compute
from .status import Observer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transport.frames import TokenRow
    from triolet.config import ServerConfig

    from .frames import Change, FrameOutbox
    from .request import Request, RequestTable
    from .roster import Roster
    from .workers import Worker


class SweepTimes:
    """Decides when to sweep the requests next.

    Args:
      config: intervals and timeouts.
    """

    def __init__(self, config: ServerConfig, now: float) -> None:
        link = config.link
        self._interval_s = link.sweep_interval_s
        # Half a heartbeat: a process that has not read the clock for a whole one was paused.
        self._lull_s = min(link.heartbeat_interval_s / 2, config.stall_timeout_s)
        self._swept_at = self._due_at = now
        self._round_due_at = math.inf

    def note(self, due_at: float) -> None:
        """Set the time at which something may be due."""
        self._due_at = min(self._due_at, due_at)
        self._round_due_at = min(self._round_due_at, due_at)

    def swept(self, now: float, *, is_round_over: bool) -> None:
        """Record a sweep. If some requests had no turn yet, the next sweep follows soon."""
        self._swept_at = self._due_at = now
        if is_round_over:
            self._due_at = min(self._round_due_at, now + self._lull_s)
            self._round_due_at = math.inf

    def next_at(self, *, is_restless: bool) -> float:
        """Return when to sweep again.

        Args:
          is_restless: work for a sweep may appear at any time.
        """
        soon = self._swept_at + self._interval_s
        return soon if is_restless else max(soon, self._due_at)


def due_at(request: Request, config: ServerConfig) -> float:
    """Return the earliest time at which a sweep may have work for a request."""
    due = request.deadline
    waiting_since = request.output.waiting_since
    if waiting_since is not None:
        due = min(due, waiting_since + config.stall_timeout_s)
    attempt, forecast = request.attempt, request.forecast
    if attempt is None:
        if not request.num_attempts and forecast is not None:
            due = min(due, forecast.first_token_by or due)
        return due
    if request.phase is Phase.RESERVING:
        due = min(due, attempt.grant_by)
    if attempt.gap_since is not None:
        due = min(due, attempt.gap_since + config.link.peer_timeout_s)
    if may_decode(request, attempt):
        due = min(due, quiet_since(request, attempt) + config.link.heartbeat_interval_s)
    return due


def quiet_since(request: Request, attempt: Attempt) -> float:
    """Return the last time that decode sent something or its credit was repeated."""
    moments = (attempt.quiet_since, attempt.granted_at or 0.0, request.times.last_token_at or 0.0)
    return max(moments)


def may_decode(request: Request, attempt: Attempt) -> bool:
    """Return whether decode may still send tokens."""
    is_computing = request.phase is Phase.PREFILLING and attempt.pair.is_local
    return is_computing or request.phase is Phase.DECODING


class Attempts:
    """The attempts of all requests.

    Args:
      config: bounds and deadlines.
      roster: the fleet's workers, shared with `Requests`.
      table: live requests.
      outbox: receives outgoing frames.
      eos_token_ids: the model's end tokens, sent to workers with each attempt.
      observer: receives events.
      kv_secret: 32 bytes from which each attempt's KV key is derived.

    Attributes:
      queue: completions that wait for workers, and charges for those that run.
      inputs: the same for embedding inputs, so that prompts never wait behind them.
      admission: accepts or refuses requests.
      recovery: decides what faults mean for the next attempts.
    """

    def __init__(
        self,
        config: ServerConfig,
        roster: Roster,
        table: RequestTable,
        outbox: FrameOutbox,
        eos_token_ids: tuple[int, ...],
        observer: Observer,
        now: float,
        kv_secret: bytes,
    ) -> None:
        self.queue: FairQueue[Request] = FairQueue(config.queue)
        self.inputs: FairQueue[Request] = FairQueue(config.queue)
        self.recovery = Recovery(config, roster.workers, observer, now)
        self.admission = Admission(
            config, roster, (self.queue, self.inputs), table, self.recovery, observer.overload, now
        )
        self._overload = self.admission.overload
        self._config = config
        self._roster = roster
        self._table = table
        self._outbox = outbox
        self._eos_token_ids = eos_token_ids
        self._observer = observer
        self._observers = observer, Observer()  # of silent requests the second, which does nothing
        self._kv_secret = kv_secret
        self._next_request, self._next_input = (
            PickNext(config, roster, queue, self.recovery, self._overload)
            for queue in (self.queue, self.inputs)
        )

    def queue_of(self, request: Request) -> FairQueue[Request]:
        """Return the queue of a request."""
        return self.inputs if request.is_input else self.queue

    def dispatch(self, now: float) -> None:
        """Start attempts for the first requests of each queue while workers have room.

        Requests do not overtake, or a long prompt would wait as long as short ones keep coming. Two
        kinds let others pass: a request that waits for another one's isolation, and one that is
        first only because its class waited too long. A request is not queued while its tenant has
        used its whole share.
        """
        for queue, pick_next in ((self.queue, self._next_request), (self.inputs, self._next_input)):
            while queue and (picked := pick_next.next(now)) is not None:
                request, route = picked
                end = (
                    route
                    if isinstance(route, Failure)
                    else self._overload.expired(request.forecast, now)
                )
                if end is None and isinstance(route, Route):
                    is_over_share = queue.is_over_share(request)
                    queue.take(request)
                    self._begin(request, route, now, is_over_share=is_over_share)
                elif end is not None:
                    self.fail(request, end, now)

    def take_rows(self, decode: Worker, rows: Iterable[TokenRow], now: float) -> bool:
        """Take tokens of many requests. Return whether an attempt started to decode or ended."""
        has_moved = False
        for row in rows:
            request = self._table.of_attempt(row.request_id, row.attempt)
            attempt = None if request is None else request.attempt
            if (
                request is None
                or attempt is None
                or attempt.pair.decode is not decode
                or request.is_input
            ):
                self._observer.frames_dropped("old_attempt")
                continue
            if request.phase is Phase.RESERVING and attempt.local_tokens:
                # Its GRANT was lost or overtaken: a worker that computes has granted the lease.
                self._compute_there(request, attempt, now)
            if not attempt.is_handed_over:
                attempt.is_handed_over = True
                attempt.pair.prefill.release(attempt.key)
            if not attempt.has_decoded:
                attempt.has_decoded = has_moved = True
                self._first_decoded(request, attempt, now)
            num_before = len(request.relay.token_ids)
            change = take_row(request, attempt, row, now)
            self._note_tokens(request, num_before, now)
            if change is not None:
                has_moved = True
                self.apply(request, change, now)
        return has_moved

    def take_answer(
        self, worker: Worker, frame: Grant | Refuse | FirstToken | Embedded | Ended, now: float
    ) -> None:
        """Apply a worker's frame about one attempt."""
        is_unknown = isinstance(frame, Ended) and frame.reason is EndReason.UNKNOWN
        if isinstance(frame, Ended) and not is_unknown:
            worker.release(frame.key, frame.freed_blocks)
        request = self._table.of_attempt(*frame.key)
        attempt = None if request is None else request.attempt
        is_vector = isinstance(frame, Embedded)
        if (
            request is None
            or attempt is None
            or worker not in attempt.pair
            or (is_vector != request.is_input and not isinstance(frame, Ended))
        ):
            if not isinstance(frame, Ended):  # an ENDED is the expected answer to an END
                self._observer.frames_dropped("old_attempt")
            return
        match frame:
            case Grant():
                self.apply(request, self._granted(request, attempt, frame, now), now)
            case Refuse():
                self.apply(request, self._refused(request, attempt, frame, now), now)
            case FirstToken():
                self._observers[request.spec.is_silent].prompt_computed(
                    frame.queue_s, frame.compute_s
                )
                attempt.first_token_at = now
                self.recovery.worked(worker, now)
                num_before = len(request.relay.token_ids)
                change = take_first_token(request, attempt, frame, now)
                self._note_tokens(request, num_before, now)
                self.apply(request, change, now)
            case Embedded():
                self._observer.prompt_computed(frame.queue_s, frame.compute_s)
                self.recovery.worked(worker, now)
                self.release_attempt(request, None)  # the worker has ended it already
                self.inputs.end(request, 0)
                self._table.embedded(request, frame.vector, now)
            case Ended():
                change = take_ended(request, attempt, worker.role, frame, now)
                if change is None and is_unknown:
                    worker.release(frame.key)
                # If not, END is sent anyway: the frame that started the attempt may still be on its
                # way.
                self.apply(request, change, now)

    def apply(self, request: Request, change: Change | None, now: float) -> None:
        """Apply the consequence of a frame, a loss or a timeout."""
        if isinstance(change, Again) and request.attempt and request.attempt.end:
            change = Finish(request.attempt.end)  # all tokens have arrived
        match change:
            case None:
                return
            case Finish(end=end):
                is_ours = end.stop_string is not None
                if request.attempt is not None:
                    decode = request.attempt.pair.decode
                    decode.prefixes.keep(request.whole_chain, decode.capacity)
                self.release_attempt(
                    request, EndReason.STOP_STRING if is_ours else EndReason(end.reason)
                )
                self.queue.end(request, len(request.relay.token_ids))
                self._overload.ended(request.forecast, now, is_well=True)
                self._table.finish(request, end, now)
            case Failure(outcome=how):
                if how is Outcome.GRAMMAR_TOO_COSTLY:
                    self.recovery.condemn(request.spec, now)
                self.fail(request, change, now)
            case Again(cause=cause):
                last = self.recovery.after(request, change, now)
                if last is not None:
                    self.fail(request, last, now)
                    return
                request.events.publish(AttemptFailed(request.facts, cause))
                self.release_attempt(request, EndReason.SUPERSEDED)
                request.step(Step.RETRY)
                self.queue_of(request).give_back(request)

    def fail(self, request: Request, failure: Failure, now: float) -> None:
        """End a request in any phase; its workers free its resources."""
        self.release_attempt(request, failure.outcome.value.end)
        self.queue_of(request).end(request, len(request.relay.token_ids))
        self._overload.ended(request.forecast, now, is_well=False)
        self._table.fail(request, failure, now)

    def sweep(self, request: Request, drain_until: float | None, now: float) -> None:
        """Apply deadlines and timeouts to one request."""
        config = self._config
        attempt = request.attempt
        waiting_since = request.output.waiting_since
        gap_since = None if attempt is None else attempt.gap_since
        is_over = now >= request.deadline or (drain_until is not None and now >= drain_until)
        if is_over and attempt is not None and attempt.end is not None:
            self.apply(request, Finish(attempt.end), now)
        elif now >= request.deadline:
            text = f"the request did not finish within its {request.spec.deadline_s:g} s"
            self.fail(request, Outcome.DEADLINE.failure(text), now)
        elif drain_until is not None and now >= drain_until:
            self.fail(request, outcome.drained(self.admission.refusal()), now)
        elif waiting_since is not None and now - waiting_since >= config.stall_timeout_s:
            self.fail(request, outcome.stalled(config.stall_timeout_s), now)
        elif (
            attempt is None and (late := self._overload.expired(request.forecast, now)) is not None
        ):
            self.fail(request, late, now)
        elif attempt is not None and request.phase is Phase.RESERVING and now >= attempt.grant_by:
            self.apply(request, Again("no_grant", FrameFault(Role.DECODE)), now)
        elif gap_since is not None and now - gap_since >= config.link.peer_timeout_s:
            self.apply(request, Again("tokens_missing", FrameFault(Role.DECODE)), now)
        elif attempt is not None and may_decode(request, attempt):
            self._repeat_credit(request, attempt, now)

    def note_pools(self) -> None:
        """Update the total capacity of decode workers, on which tenants' shares are based."""
        decodes = [one for one in self._roster.workers if one.role is Role.DECODE]
        pools = [worker.capacity for worker in decodes if worker.is_connected]
        kv_tokens = sum(pool.num_blocks * pool.block_size for pool in pools if pool is not None)
        rows = sum(pool.max_num_seqs for pool in pools if pool is not None)
        self.queue.note_pools(kv_tokens, rows)

    def end_without_workers(self, now: float) -> None:
        """End requests if their workers have been away too long and are not expected back."""
        if self.admission.presence.is_coming(now):
            return
        needed = ((self.queue, needed_roles(self._config.routing)), (self.inputs, (Role.PREFILL,)))
        for queue, roles in needed:
            gone = {
                placement: missing_role(
                    self._roster.pool(placement), roles, self._config.worker_wait_s, now
                )
                for placement in queue.placements
            }
            for request in queue if any(gone.values()) else ():
                placement = request.spec.scheduling.placement
                if (role := gone.get(placement)) is not None:
                    self.fail(request, outcome.no_worker_left(role, placement), now)

    def begin_anew(self, cause: str, now: float) -> None:
        """Give up every lease after a failure of this server, and retry all attempts."""
        for worker in self._roster.workers:
            if worker.is_connected:
                worker.lost(now, is_its_fault=False)
                num_requests = sum(request.needs(worker) for request in self._table)
                self._observer.worker_lost(str(worker), cause, num_requests)
        for request in self._table:
            if request.attempt is not None:
                self.apply(request, Again(cause), now)

    def _repeat_credit(self, request: Request, attempt: Attempt, now: float) -> None:
        """Resend the token credit of a quiet stream. Decode may wait for a lost credit, or assume
        that the last tokens of its window arrived; nothing else would correct it."""
        num_tokens = len(request.relay.token_ids)
        if num_tokens >= attempt.allowed:
            attempt.quiet_since = now
        elif now - quiet_since(request, attempt) >= self._config.link.heartbeat_interval_s:
            attempt.quiet_since = now
            decode = attempt.pair.decode
            self._outbox.allow(decode, attempt.key, attempt.allowed, num_tokens)

    def _begin(self, request: Request, route: Route, now: float, *, is_over_share: bool) -> None:
        pair, spec = route.pair, request.spec
        times = request.times
        request.zone = pair.decode.site.zone
        if times.dispatched_at is None:
            times.dispatched_at = now
            queue_s = now - times.submitted_at
            request.events.publish(RequestDispatched(request.facts, queue_s, request.zone))
        self._overload.dispatched(request.forecast, now)
        need = request.need
        key = AttemptKey(spec.request_id, request.num_attempts)
        attempt = Attempt(
            key=key,
            pair=pair,
            rank=spec.scheduling.rank(spec.priority, is_over_share=is_over_share),
            grant_by=now + self._config.link.peer_timeout_s,
            allowed=request.allowed,
            local_tokens=route.local_tokens,
            why=route.why,
            fork_of=route.fork_of,
            kv_key=kv_key(self._kv_secret, key),
        )
        request.num_attempts += 1
        request.attempt = attempt
        request.step(Step.DISPATCH)
        if request.is_input:
            self._embed(request, attempt, now)
            return
        need = need_on(route, need)
        num_blocks = blocks_needed(pair.decode, need)
        num_tokens = counted_tokens(pair.prefill, need)
        if not pair.is_local:
            pair.prefill.reserve(
                key,
                num_tokens=num_tokens,
                is_isolated=need.is_isolated,
                band=Band(spec.scheduling.service_class, is_over_share),
            )
            # Now, so that the next prompt finds the prefix there.
            pair.prefill.prefixes.keep(request.chain, pair.prefill.capacity)
        pair.decode.reserve(
            key,
            num_blocks=num_blocks,
            num_tokens=num_tokens if pair.is_local else 0,
            is_isolated=need.is_isolated,
        )
        pair.decode.asked(key)
        self._outbox.send(pair.decode, reserve_frame(request, attempt, self._eos_token_ids, now))

    def _embed(self, request: Request, attempt: Attempt, now: float) -> None:
        """Send an input to prefill for embedding; decode holds no lease."""
        worker = attempt.pair.prefill
        worker.reserve(
            attempt.key,
            input_tokens=len(request.spec.prompt_ids),
            is_isolated=request.poison.isolated,
            is_suspect=request.poison.is_of_prompt,
        )
        worker.asked(attempt.key)
        attempt.granted_at = now
        request.step(Step.GRANT)
        request.is_begun = True
        self._outbox.send(worker, embed_frame(request, attempt, now))

    def _granted(
        self, request: Request, attempt: Attempt, grant: Grant, now: float
    ) -> Change | None:
        decode, prefill = attempt.pair
        if request.phase is not Phase.RESERVING or grant.epoch != decode.monitor.epoch:
            self._observer.frames_dropped("doubled_or_old_life")
            return None
        assert decode.capacity is not None, "only welcomed workers are asked"
        held_tokens = grant.held_blocks * decode.capacity.block_size
        if grant.is_local:
            if not attempt.local_tokens:
                return Again("local_unasked", FrameFault(Role.DECODE))
            request.cached_tokens = held_tokens
            self._compute_there(request, attempt, now)
            return None
        if attempt.pair.is_local:
            return Again("local_refused", FrameFault(Role.DECODE))
        decode.granted(attempt.key)
        attempt.granted_at = now
        request.step(Step.GRANT)
        if request.num_attempts == 1:
            request.held_tokens = held_tokens
        prefill.asked(attempt.key)
        request.is_begun = True
        self._observers[request.spec.is_silent].prompt_routed(Role.PREFILL, attempt.why[1])
        frame = prefill_frame(request, attempt, self._eos_token_ids, grant.held_blocks, now)
        self._outbox.send(prefill, frame)
        return None

    def _compute_there(self, request: Request, attempt: Attempt, now: float) -> None:
        """Record that decode has the lease and computes the prompt itself."""
        decode, prefill = attempt.pair
        if prefill is not decode:
            prefill.release(attempt.key)
            attempt.pair = Pair(decode, decode)
            num_tokens = tokens_to_compute(decode, request.need)
            decode.shares[attempt.key].num_tokens = num_tokens
        decode.granted(attempt.key)
        attempt.granted_at = now
        attempt.is_handed_over = True  # no other worker holds anything for it
        request.is_begun = True
        request.step(Step.GRANT)
        self._observers[request.spec.is_silent].prompt_routed(Role.DECODE, attempt.why[0])

    def _first_decoded(self, request: Request, attempt: Attempt, now: float) -> None:
        """Record that decode has the whole prompt, whichever worker computed it."""
        decode = attempt.pair.decode
        decode.prefixes.keep(request.chain, decode.capacity)
        self.recovery.worked(decode, now)
        if attempt.pair.is_local:
            decode.computed(attempt.key)
            if attempt.granted_at is not None and attempt.fork_of is None:
                self._observers[request.spec.is_silent].prompt_computed(
                    None, now - attempt.granted_at
                )
        elif attempt.first_token_at is not None:
            self._next_request.handed_over(now - attempt.first_token_at)

    def _refused(self, request: Request, attempt: Attempt, refusal: Refuse, now: float) -> Change:
        if refusal.reason is RefuseReason.TOO_LONG:
            # Its limits are tighter than announced, or it restarted with smaller ones.
            return Outcome.TOO_LONG.failure("prompt and max_tokens exceed what a worker can hold")
        if refusal.reason is RefuseReason.NO_FORK:
            note_no_fork(request, attempt)
            return Again("refused_no_fork")
        decode = attempt.pair.decode
        pause_s = max(refusal.retry_after_s, self._config.link.sweep_interval_s)
        decode.busy_until = max(decode.busy_until, now + pause_s)
        is_fault = refusal.reason is RefuseReason.ENDED
        fault = FrameFault(Role.DECODE, is_workers=False) if is_fault else None
        return Again(f"refused_{refusal.reason}", fault)

    def release_attempt(self, request: Request, reason: EndReason | None) -> None:
        """End the current attempt on its workers. All attempts end here.

        Args:
          request: the attempt's request.
          reason: the reason sent to workers; None if the worker has already ended it.
        """
        attempt, request.attempt = request.attempt, None
        if attempt is None:
            return
        for worker in attempt.pair:
            if worker.release(attempt.key) and reason is not None:
                self._outbox.send(worker, End(*attempt.key, reason))

    def _note_tokens(self, request: Request, num_before: int, now: float) -> None:
        times = request.times
        num_tokens = len(request.relay.token_ids)
        if num_tokens > num_before and (request.faults or request.poison.strikes):
            self.recovery.advanced(request)
        for _ in range(num_before, num_tokens):
            if times.last_token_at is None:
                times.first_token_at = now
                self._overload.first_token(request.forecast, now)
                ttft_s = now - times.submitted_at
                event = FirstTokenArrived(request.facts, ttft_s, request.zone)
                request.events.publish(event)
            else:
                gap_s, observer = now - times.last_token_at, self._observers[request.spec.is_silent]
                observer.token_gaps.observe(gap_s)
                if gap_s > observer.slow_gap_s:
                    # With half a window unread the row was paused, because the client is slow.
                    num_unread = num_before - request.output.num_taken
                    times.slow_gaps += num_unread <= request.window // 2
            times.last_token_at = now
