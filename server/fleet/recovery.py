"""What follows from a fault for the request that it struck: another attempt, or an end.

A request has at most `max_attempts` tries that get it nowhere (retry_budget.py says what they
cost): one that gets on between two deaths may outlive any number of workers. It goes elsewhere if
there is an elsewhere, and is tried no more once it is convicted (suspicion.py). Workers that fail
are given a rest (breaker.py). Decides only; the attempts themselves are attempts.py's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from triolet.ids import Role

from . import ends
from .paths import BrokenPaths
from .phases import Phase
from .quarantine import Quarantine, TenantGrammar, grammar_digest, prompt_digest
from .retry_budget import RetryBudget
from .suspicion import CLEARING_TOKENS, Standing

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from triolet.config import ServerConfig

    from ..generation import GenerationRequest
    from .observer import FleetObserver
    from .progress import Again, Fault
    from .sequence import Attempt
    from .sequence import Sequence as RunningSequence
    from .workers import Worker


MAX_EXPLAINED: Final = 1024
"""Events of which is remembered whose doing they were: at most three per conviction."""


class Recovery:
    """The memory of faults of one server.

    Args:
      config: bounds.
      workers: every worker there is or will be.
      observer: told of what changes.
      now: the time of the start.

    Attributes:
      paths: pairs of workers that lost one another.
    """

    def __init__(
        self,
        config: ServerConfig,
        workers: Sequence[Worker],
        observer: FleetObserver,
        now: float,
    ) -> None:
        self.paths = BrokenPaths(config.recovery)
        self._max_attempts = config.max_attempts
        self._workers = workers
        self._observer = observer
        self._budget = RetryBudget(config.recovery, now)
        self._prompts = Quarantine(config.recovery, prompt_digest)
        self._grammars = Quarantine(config.recovery, grammar_digest)
        self._explained: dict[Hashable, None] = {}
        self._shown = {worker: worker.breaker.state for worker in workers}

    @property
    def retries_left(self) -> float:
        """What the budget can afford."""
        return self._budget.tokens

    @property
    def num_quarantined(self) -> int:
        """Prompts and grammars that are refused."""
        return len(self._prompts) + len(self._grammars)

    def accepted(self) -> None:
        """Note a request that was taken on: it pays a part of a retry."""
        self._budget.earn()

    def objection(self, prompt_ids: Sequence[int], now: float) -> ends.End | None:
        """Return the end of a request whose prompt is in quarantine, or None for any other."""
        remaining_s = self._prompts.remaining_s(prompt_ids, now)
        return None if remaining_s is None else ends.quarantined()

    def objection_to(self, request: GenerationRequest, now: float) -> ends.End | None:
        """Return the end of a request with a prompt or grammar in quarantine."""
        grammar = request.sampling.grammar
        if grammar is not None:
            one = TenantGrammar(request.claim.tenant, grammar)
            if self._grammars.remaining_s(one, now) is not None:
                return ends.grammar_too_costly()
        return self.objection(request.prompt_ids, now)

    def condemn(self, request: GenerationRequest, now: float) -> None:
        """Refuse the grammar of a request that held a worker up with it."""
        grammar = request.sampling.grammar
        if grammar is not None:
            self._grammars.add(TenantGrammar(request.claim.tenant, grammar), now)
            self._observer.faults.grammar_quarantined(request.request_id.hex())

    def worked(self, worker: Worker, now: float) -> None:
        """Note that a worker did for an attempt what it is there for."""
        worker.breaker.succeeded(now)
        self._show(worker)

    def after(self, sequence: RunningSequence, again: Again, now: float) -> ends.End | None:
        """Take in why the present attempt of a sequence is over.

        Returns:
          The end of the request, or None if it may be tried again.
        """
        attempt, fault = sequence.attempt, again.fault
        if fault is None or attempt is None:
            return None
        worker = attempt.pair.of(fault.at)
        event = _event(again.cause, fault, attempt)
        if self._is_anothers(event, fault, sequence, worker):
            return None
        if self._budget.is_new(event, now):
            self._count(worker, fault, attempt, now)
        if fault.is_workers:
            sequence.shunned |= {worker.address}
        num_tokens = len(sequence.relay.token_ids)
        sequence.faults.append(event)
        sequence.faulted_at = num_tokens
        if fault.num_suspects:
            is_prompt = attempt.pair.is_local and sequence.phase is Phase.PREFILLING
            work = Role.PREFILL if is_prompt else fault.at
            standing = sequence.suspicion.struck(work, num_tokens, fault.num_suspects)
            if standing is Standing.CONVICTED:
                self._convict(sequence, now)
                return ends.quarantined()
        sequence.faults = [fault for fault in sequence.faults if fault not in self._explained]
        if len(sequence.faults) >= self._max_attempts:
            return ends.attempts_spent(len(sequence.faults), again.cause)
        if not self._budget.take(event, now):
            self._observer.faults.retry_unaffordable()
            return ends.retries_spent(again.cause)
        return None

    def advanced(self, sequence: RunningSequence) -> None:
        """Take in that a sequence has more tokens: one that gets on is no lost cause."""
        num_tokens = len(sequence.relay.token_ids)
        if sequence.faults and num_tokens - sequence.faulted_at >= CLEARING_TOKENS:
            sequence.faults.clear()
        if sequence.attempt is not None and sequence.suspicion.advanced(num_tokens):
            for worker in sequence.attempt.pair:
                share = worker.shares.get(sequence.attempt.key)
                if share is not None:
                    share.is_on_probation = False

    def sweep(self, now: float) -> None:
        """Let time pass."""
        self._budget.advance(now)
        self.paths.forget(now)
        for worker in self._workers:
            worker.breaker.advance(now)
            self._show(worker)

    def _is_anothers(
        self, event: Hashable, fault: Fault, sequence: RunningSequence, worker: Worker
    ) -> bool:
        """Return whether somebody on probation was there, whose doing this was. Its own ENDED may
        be still to come."""
        if event in self._explained:
            return True
        if not fault.num_suspects or sequence.suspicion.is_on_probation:
            return False
        # Not one that has just been sent there: it was in no step yet.
        is_decode = fault.at is Role.DECODE
        return any(
            share.is_on_probation and (share.is_granted if is_decode else share.is_asked)
            for share in worker.shares.values()
        )

    def _convict(self, sequence: RunningSequence, now: float) -> None:
        """Refuse its prompt, and hold what it did against no other request."""
        self._prompts.add(sequence.request.prompt_ids, now)
        for event in sequence.faults:
            self._explained[event] = None
        while len(self._explained) > MAX_EXPLAINED:
            del self._explained[next(iter(self._explained))]
        self._observer.faults.request_quarantined(sequence.request.request_id.hex())

    def _count(self, worker: Worker, fault: Fault, attempt: Attempt, now: float) -> None:
        """Hold a fault against a worker or a path. Attempts that it struck together count once."""
        if fault.is_path:
            self.paths.broke(attempt.pair.prefill, attempt.pair.decode, now)
        if fault.is_workers:
            worker.breaker.failed(now)
            self._show(worker)

    def _show(self, worker: Worker) -> None:
        state = worker.breaker.state
        if self._shown[worker] is not state:
            self._shown[worker] = state
            self._observer.faults.breaker_changed(str(worker), state.value)


def _event(cause: str, fault: Fault, attempt: Attempt) -> Hashable:
    """Name what happened; what other attempts fail by as well has one name."""
    if not fault.is_shared:
        return attempt.key
    if fault.is_path:
        return (cause, attempt.pair.prefill.peer_id, attempt.pair.decode.peer_id)
    return (cause, attempt.pair.of(fault.at).peer_id, fault.step)
