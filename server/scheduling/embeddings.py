"""Inputs that become vectors, from submission to their one end, over as many attempts as it takes.

Decides and sends nothing: frames pile up in the outbox. An input goes to one prefill worker, under
a lease like any attempt's; no KV travels and decode knows nothing of it. Beside requests for tokens
inputs come last: they take no prompt credit, only a part of it beside, so no chat waits in the line
for them. Knows no tasks and no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from transport.frames import Embed, Embedded, End, Ended, EndReason
from transport.tokens import pack_tokens
from triolet.errors import RequestError, crowded_out, draining, invalid_request
from triolet.ids import AttemptKey, Role

from ..contract.charges import NO_CHARGES
from ..contract.embedding import EmbeddingResult
from ..contract.generation import Usage
from . import outcome
from .accounting import Outcome
from .admission import limits_of, missing_role
from .fair_queue import FairQueue
from .newcomer import crowd
from .tenant_queue import Place
from .workers import ejected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from triolet.config import ServerConfig

    from ..contract.charges import Charges
    from ..contract.embedding import EmbeddingRequest
    from .accounting import Accounting
    from .observer import FleetObserver
    from .outbox import Outbox
    from .recovery import Recovery
    from .workers import Worker

log = structlog.get_logger()

INPUTS_PER_TURN: Final = 16
"""Of one request before others have theirs: a single query overtakes a request of thousands."""
RETRIED: Final = frozenset(
    {EndReason.LEASE_EXPIRED, EndReason.UNKNOWN, EndReason.ERROR, EndReason.EMBEDDED}
)
"""Ends that count as a fault. `embedded` is one if it comes before the vector, which was lost."""


@dataclass(slots=True, eq=False)
class Input:
    """One input until its end.

    Attributes:
      request: what was asked for.
      turn: rises with its place in its client's request.
      order: rises with each accepted input.
      deadline: when it ends whatever it has.
      submitted_at: when it came.
      on_done: called once, when the result is there.
      result: what became of it.
      key: of the present attempt; None while it waits.
      worker: where that runs.
      num_attempts: tries begun so far.
      num_faults: of these, those that failed.
      is_over: it has its end.
    """

    request: EmbeddingRequest
    turn: int
    order: int
    deadline: float
    submitted_at: float
    on_done: Callable[[], None]
    result: EmbeddingResult = field(default_factory=EmbeddingResult)
    key: AttemptKey | None = None
    worker: Worker | None = None
    num_attempts: int = 0
    num_faults: int = 0
    is_over: bool = False

    @property
    def place(self) -> Place:
        """What the queue has to know of it."""
        request = self.request
        tokens = len(request.input_ids)
        return Place(request.scheduling, request.priority, self.turn, self.order, tokens)


class Embeddings:
    """All inputs of one server.

    Args:
      config: bounds and deadlines.
      workers: every worker there is or will be.
      accounting: the server's, which counts each input as a request.
      outbox: takes the frames.
      recovery: the memory of faults.
      observer: told of what happens.
      max_model_len: of the model's own text.
      charges: told what each input used.

    Attributes:
      line: who waits for a worker.
    """

    def __init__(
        self,
        config: ServerConfig,
        workers: tuple[Worker, ...],
        accounting: Accounting,
        outbox: Outbox,
        recovery: Recovery,
        observer: FleetObserver,
        max_model_len: int,
        charges: Charges = NO_CHARGES,
    ) -> None:
        self._config = config
        self._workers = workers
        self._accounting = accounting
        self._outbox = outbox
        self._recovery = recovery
        self._observer = observer
        self._max_model_len = max_model_len
        self._charges = charges
        self._inputs: dict[bytes, Input] = {}
        self.line: FairQueue[Input] = FairQueue(config.queue)
        self._suspects: set[Input] = set()

    def __len__(self) -> int:
        return len(self._inputs)

    def __iter__(self) -> Iterator[Input]:
        """Go through the live inputs; they may end meanwhile."""
        return iter(list(self._inputs.values()))

    @property
    def num_waiting(self) -> int:
        """Inputs that wait for a worker."""
        return len(self.line)

    def submit(
        self,
        requests: Sequence[EmbeddingRequest],
        on_done: Callable[[], None],
        now: float,
        *,
        is_draining: bool,
    ) -> list[Input]:
        """Accept all inputs of a client's request, or none.

        Raises:
          RequestError: refused, and nothing was begun.
        """
        for _ in requests:
            self._accounting.received += 1
            self._observer.request_received()
        try:
            self._refuse(requests, now, is_draining=is_draining)
        except RequestError as error:
            error.is_of_queue = True
            for request in requests:
                self._accounting.rejected[error.code] += 1
                self._observer.request_rejected(error.code, request.scheduling)
            raise
        inputs = [self._accept(request, at, on_done, now) for at, request in enumerate(requests)]
        self.dispatch(now)
        return inputs

    def dispatch(self, now: float) -> None:
        """Send inputs to workers as long as these have room."""
        while self.line:
            turn = self._next_turn()
            if turn is None:
                return
            self.line.take(turn[0])
            self._begin(*turn, now)

    def take(self, worker: Worker, frame: Embedded | Ended, now: float) -> bool:
        """Take what a worker says of an attempt; return whether it is one of an input's."""
        is_known = isinstance(frame, Ended) and frame.reason is not EndReason.UNKNOWN
        if isinstance(frame, Ended) and is_known and worker.inputs.pop(frame.key, None) is not None:
            worker.available_blocks += frame.freed_blocks
        one = self._inputs.get(frame.request_id)
        if one is None:
            return isinstance(frame, Embedded)
        if one.key != frame.key or one.worker is not worker:
            return True  # of an attempt that was given up
        if isinstance(frame, Embedded):
            self._observer.prefill_computed(frame.queue_s, frame.compute_s)
            self._recovery.worked(worker, now)
            one.result.vector = frame.vector
            self._leave(one, None)
            self._close(one, Outcome.EMBEDDED, now)
        elif frame.reason is EndReason.DRAIN:
            self._again(one, "prefill_drain", now, is_fault=False)
        elif frame.reason in RETRIED:
            if frame.reason is EndReason.ERROR:
                worker.breaker.failed(now)
            self._again(one, f"prefill_{frame.reason}", now)
        self.dispatch(now)
        return True

    def cancel(self, one: Input, end: outcome.End, now: float) -> None:
        """End an input from outside. Idempotent."""
        if not one.is_over:
            self._fail(one, end, now)

    def lost(self, worker: Worker, cause: str, now: float, *, is_fault: bool) -> None:
        """Take in that a worker is gone."""
        for one in self:
            if one.worker is worker:
                self._again(one, cause, now, is_fault=is_fault)

    def begin_anew(self, cause: str, now: float) -> None:
        """Give up every attempt through this server's own fault."""
        for one in self:
            if one.key is not None:
                self._again(one, cause, now, is_fault=False)

    def sweep(self, drain_until: float | None, now: float) -> None:
        """Look for whatever time alone brings about."""
        for one in self:
            if now >= one.deadline:
                self._fail(one, outcome.too_late(one.request.deadline_s), now)
            elif drain_until is not None and now >= drain_until:
                self._fail(one, outcome.drained(), now)
        if self.line and _is_hopeless(self._workers, self._config, now):
            for one in self.line:
                self._fail(one, outcome.no_worker_left(Role.PREFILL), now)
        self.dispatch(now)

    def is_wanted(self, worker: Worker, key: AttemptKey) -> bool:
        """Return whether an input has this as its present attempt, on this worker."""
        one = self._inputs.get(key.request_id)
        return one is not None and one.key == key and one.worker is worker

    def _refuse(
        self, requests: Sequence[EmbeddingRequest], now: float, *, is_draining: bool
    ) -> None:
        if is_draining:
            raise draining()
        limits = limits_of(self._workers, self._max_model_len)
        for at, request in enumerate(requests):
            objection = self._recovery.objection(request.input_ids, now)
            if objection is not None:
                raise objection.error
            if len(request.input_ids) > limits.max_model_len:
                raise invalid_request(
                    f"input {at} has {len(request.input_ids)} tokens; this model takes at most "
                    f"{limits.max_model_len}",
                    "input",
                    "context_length_exceeded",
                )
        if _is_hopeless(self._workers, self._config, now):
            raise outcome.no_worker_left(Role.PREFILL).error
        most = self._config.embedding.max_waiting_inputs
        for scheduling in {request.scheduling for request in requests}:
            if num_waiting := crowd(self.line, scheduling, len(requests), most):
                raise crowded_out(f"{num_waiting} inputs wait already", 1.0)

    def _accept(
        self, request: EmbeddingRequest, at: int, on_done: Callable[[], None], now: float
    ) -> Input:
        self._accounting.accepted += 1
        self._observer.request_accepted()
        self._charges.accepted(request.request_id)
        one = Input(
            request,
            turn=at // INPUTS_PER_TURN,
            order=self._accounting.accepted,
            deadline=now + request.deadline_s,
            submitted_at=now,
            on_done=on_done,
        )
        self._inputs[request.request_id] = one
        self.line.add(one, one.place)
        return one

    def _next_turn(self) -> tuple[Input, Worker] | None:
        """Return who may leave the line, and where to. Who has failed before may not share a worker
        with another one that has: so a bad input is soon alone with its like."""
        pool = [w for w in self._workers if w.role is Role.PREFILL and w.is_usable]
        left_out = ejected(pool, lambda worker: worker.breaker)
        usable = sorted(
            (worker for worker in pool if worker not in left_out),
            key=lambda worker: (sum(worker.inputs.values()), worker.address),
        )
        suspects_on = {one.worker for one in self._suspects}
        line = self.line
        try:
            one = line.first()
            while one is not None:
                for worker in usable:
                    if _has_room(worker, len(one.request.input_ids), self._config) and not (
                        one.num_faults and worker in suspects_on
                    ):
                        return one, worker
                if one.num_faults:
                    line.set_aside(one)
                    one = line.first()
                elif line.lets_pass(one):
                    one = line.first(is_aged_too=False)
                else:
                    return None
        finally:
            line.restore()
        return None

    def _begin(self, one: Input, worker: Worker, now: float) -> None:
        request, form = one.request, one.request.form
        if not one.num_attempts:
            service_class = request.scheduling.service_class
            self._observer.request_dispatched(now - one.submitted_at, service_class)
        one.key, one.worker = AttemptKey(request.request_id, one.num_attempts), worker
        one.num_attempts += 1
        worker.inputs[one.key] = len(request.input_ids)
        worker.breaker.begin(one.key)
        frame = Embed(
            *one.key,
            prompt=pack_tokens(request.input_ids),
            pooling=form.pooling,
            dimensions=form.dimensions,
            is_normalized=form.is_normalized,
            priority=request.rank,
            remaining_s=max(one.deadline - now, 0.0),
        )
        self._outbox.send(worker, frame)

    def _again(self, one: Input, cause: str, now: float, *, is_fault: bool = True) -> None:
        if is_fault:
            one.num_faults += 1
            self._suspects.add(one)
        self._leave(one, EndReason.SUPERSEDED)
        if one.num_faults >= self._config.max_attempts:
            self._fail(one, outcome.attempts_spent(one.num_faults, cause), now)
            return
        self._observer.attempt_failed(cause)
        self.line.give_back(one)

    def _fail(self, one: Input, end: outcome.End, now: float) -> None:
        self._leave(one, end.reason)
        one.result.error = end.error
        self._close(one, end.outcome, now)

    def _leave(self, one: Input, reason: EndReason | None) -> None:
        """End the present attempt; its worker is told unless it has ended by itself."""
        key, worker = one.key, one.worker
        one.key = one.worker = None
        if key is None or worker is None:
            return
        worker.breaker.leave(key)
        if worker.inputs.pop(key, None) is not None and reason is not None:
            self._outbox.send(worker, End(*key, reason))

    def _close(self, one: Input, outcome: Outcome, now: float) -> None:
        one.is_over = True
        self.line.end(one, 0)
        self._suspects.discard(one)
        del self._inputs[one.request.request_id]
        self._accounting.ended[outcome] += 1
        usage = Usage(len(one.request.input_ids), 0)
        elapsed_s = now - one.submitted_at
        self._observer.request_ended(outcome, usage, elapsed_s, one.request.scheduling)
        cost = self._charges.ended(one.request.request_id, usage, is_begun=one.num_attempts > 0)
        log.info(
            "input_ended",
            request_id=one.request.request_id.hex(),
            client_request_id=one.request.client_request_id,
            outcome=outcome.value,
            prompt_tokens=usage.prompt_tokens,
            elapsed_s=round(elapsed_s, 4),
            **({} if cost is None else {"cost": cost}),
        )
        one.on_done()


def _is_hopeless(workers: Iterable[Worker], config: ServerConfig, now: float) -> bool:
    """Return whether prefill workers have been away for too long."""
    return missing_role(workers, (Role.PREFILL,), config.worker_wait_s, now) is not None


def _has_room(worker: Worker, num_tokens: int, config: ServerConfig) -> bool:
    """Return whether a prefill worker takes an input: within its part of the credit, or alone."""
    if worker.beat is None:
        return False
    credit = config.embedding.credit_share * worker.beat.token_credit
    under_way = sum(worker.inputs.values())
    return not under_way or under_way + num_tokens <= credit
