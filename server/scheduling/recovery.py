"""How many retries this server can afford, so that a sick fleet is not buried under them.

A bucket of tokens. Every accepted request pays in a tenth of a retry, time pays in a little, so
that a small fleet can recover at all, and the bucket holds a burst. What is taken out:

* Attempts that fail by one event are one fault and cost one token together: the loss of a worker's
  life, one device step that raised, one broken path between two workers, one silence for which a
  worker gave up leases. However many streams a worker had, its death costs one token: they have to
  be moved once, and a life can be lost once only.
* Everything else (a RESERVE without an answer, tokens that never came, an attempt that a worker
  ended with an error of its own) costs one token for each attempt. These are the faults that
  retries can multiply.

Being refused for want of room, preemption and drain are no faults and cost nothing. A request whose
retry cannot be paid for ends with an error. Knows faults by their names only; the clock is the
caller's.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from transport.tokens import pack_tokens
from triolet.ids import Role
from triolet.units import SECONDS

from . import outcome
from .paths import BrokenPaths
from .poison import CLEARING_TOKENS, Standing
from .request import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from triolet.config import RecoveryConfig, ServerConfig
    from triolet.sampling import Grammar

    from ..contract.generation import GenerationRequest
    from .observer import FleetObserver
    from .progress import Again, Fault
    from .request import Attempt, Request
    from .workers import Worker


ONE_FAULT_S: Final = 2 * SECONDS
"""Attempts that fail by the same event within this time fail together. What one event brings about
arrives within moments; a path or a lease breaks a second time after two seconds at the earliest
(`kv_stall_s`, `lease_ttl_s`)."""


class RetryBudget:
    """One server's bucket.

    Args:
      config: what is paid in, and how much it holds.
      now: the time of the start; the bucket is full then.
    """

    def __init__(self, config: RecoveryConfig, now: float) -> None:
        self._config = config
        self._tokens = config.retry_burst
        self._filled_at = now
        # In the order of time: what was decided for each fault that several attempts share.
        self._decided: dict[Hashable, tuple[float, bool]] = {}

    @property
    def tokens(self) -> float:
        """Retries that can be afforded, as of the last call."""
        return self._tokens

    def earn(self) -> None:
        """Note an accepted request."""
        self._add(self._config.retry_share)

    def advance(self, now: float) -> None:
        """Let time pay in."""
        self._add((now - self._filled_at) * self._config.retry_floor_per_s)
        self._filled_at = now

    def is_new(self, fault: Hashable, now: float) -> bool:
        """Return whether nothing was paid for this fault lately."""
        self._forget(now)
        return fault not in self._decided

    def take(self, fault: Hashable, now: float) -> bool:
        """Pay for a retry; return False if it cannot be afforded.

        Args:
          fault: names the event; attempts that fail by the same one get the same answer.
          now: the time.
        """
        if not self.is_new(fault, now):
            return self._decided[fault][1]
        self.advance(now)
        is_affordable = self._tokens >= 1
        if is_affordable:
            self._tokens -= 1
        self._decided[fault] = (now, is_affordable)
        return is_affordable

    def _add(self, tokens: float) -> None:
        self._tokens = min(self._tokens + tokens, self._config.retry_burst)

    def _forget(self, now: float) -> None:
        while self._decided:
            fault = next(iter(self._decided))
            if now - self._decided[fault][0] <= ONE_FAULT_S:
                return
            del self._decided[fault]


T = TypeVar("T")


class TenantGrammar(NamedTuple):
    """A grammar as one tenant sends it: what it does there refuses nothing of another tenant.

    Attributes:
      tenant: its name; empty where there are no tenants.
      grammar: that its request carries.
    """

    tenant: str
    grammar: Grammar


def prompt_digest(prompt_ids: Sequence[int]) -> bytes:
    """Return what a prompt is remembered by."""
    return hashlib.blake2b(pack_tokens(prompt_ids), digest_size=16).digest()


def grammar_digest(one: TenantGrammar) -> bytes:
    """Return what a tenant's grammar is remembered by."""
    text = f"{one.tenant}\n{one.grammar.kind}\n{one.grammar.text}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


class Quarantine(Generic[T]):
    """The table of one kind.

    Args:
      config: how long, and how many at most.
      digest: what one of the kind is remembered by.
    """

    def __init__(self, config: RecoveryConfig, digest: Callable[[T], bytes]) -> None:
        self._digest = digest
        self._keep_s = config.quarantine_s
        self._max_refused = config.max_quarantined
        # In the order in which they are forgotten.
        self._until: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, one: T, now: float) -> None:
        """Refuse one from now on."""
        digest = self._digest(one)
        self._until.pop(digest, None)
        if len(self._until) >= self._max_refused:
            del self._until[next(iter(self._until))]
        self._until[digest] = now + self._keep_s

    def remaining_s(self, one: T, now: float) -> float | None:
        """Return how long one is refused still, or None if it is not."""
        self._forget(now)
        if not self._until:  # nearly always: digests of long prompts cost time
            return None
        until = self._until.get(self._digest(one))
        return None if until is None else until - now

    def _forget(self, now: float) -> None:
        while self._until:
            digest = next(iter(self._until))
            if self._until[digest] > now:
                return
            del self._until[digest]


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

    def objection(self, prompt_ids: Sequence[int], now: float) -> outcome.End | None:
        """Return the end of a request whose prompt is in quarantine, or None for any other."""
        remaining_s = self._prompts.remaining_s(prompt_ids, now)
        return None if remaining_s is None else outcome.quarantined()

    def objection_to(self, request: GenerationRequest, now: float) -> outcome.End | None:
        """Return the end of a request with a prompt or grammar in quarantine."""
        grammar = request.sampling.grammar
        if grammar is not None:
            one = TenantGrammar(request.scheduling.tenant, grammar)
            if self._grammars.remaining_s(one, now) is not None:
                return outcome.grammar_too_costly()
        return self.objection(request.prompt_ids, now)

    def condemn(self, request: GenerationRequest, now: float) -> None:
        """Refuse the grammar of a request that held a worker up with it."""
        grammar = request.sampling.grammar
        if grammar is not None:
            self._grammars.add(TenantGrammar(request.scheduling.tenant, grammar), now)
            self._observer.faults.grammar_quarantined(request.request_id.hex())

    def worked(self, worker: Worker, now: float) -> None:
        """Note that a worker did for an attempt what it is there for."""
        worker.breaker.succeeded(now)
        self._show(worker)

    def after(self, sequence: Request, again: Again, now: float) -> outcome.End | None:
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
                return outcome.quarantined()
        sequence.faults = [fault for fault in sequence.faults if fault not in self._explained]
        if len(sequence.faults) >= self._max_attempts:
            return outcome.attempts_spent(len(sequence.faults), again.cause)
        if not self._budget.take(event, now):
            self._observer.faults.retry_unaffordable()
            return outcome.retries_spent(again.cause)
        return None

    def advanced(self, sequence: Request) -> None:
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
        self, event: Hashable, fault: Fault, sequence: Request, worker: Worker
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

    def _convict(self, sequence: Request, now: float) -> None:
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
