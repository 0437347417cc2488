"""What faults mean for the next attempts: the retry budget, broken paths, breakers, and requests
that may make workers fail: strikes, isolation, and the quarantine of their prompts.

The retry budget is a bucket of tokens. Every accepted request pays in a tenth of a retry, time pays
in a little, so that a small fleet can recover at all, and the bucket holds a burst. Taken out:

* Attempts that fail by one event are one fault and cost one token together: the loss of a worker's
  life, one device step that raised, one broken path between two workers, one silence for which a
  worker gave up leases. However many streams a worker had, its death costs one token: they have to
  be moved once, and a life can be lost once only.
* Everything else (a RESERVE without an answer, tokens that never came, an attempt that a worker
  ended with an error of its own) costs one token for each attempt. These are the faults that
  retries can multiply.

Being refused for want of room, preemption and drain are no faults and cost nothing. A request whose
retry cannot be paid for ends with an error.

The engine computes the same thing for the same tokens. So a request that is there whenever a
worker dies or a step raises at one point of its text is the cause, and one that gets past that
point is not:

    1st strike               it is tried again beside the others
    2nd strike, with others  isolated: from now on it shares no worker with another isolated one
    2nd strike, alone        quarantined
    3rd strike               quarantined

Strikes are cleared by `CLEARING_TOKENS` more tokens, and by a strike in the other role: the request
has got through the first one meanwhile. They are kept per request, not per prompt: several choices
of one prompt are struck by one event. What is quarantined is the prompt.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from transport.tokens import pack_tokens
from triolet.ids import Role
from triolet.units import SECONDS

from . import outcome
from .outcome import Outcome
from .workers import BreakerState

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from triolet.config import RecoveryConfig, ServerConfig
    from triolet.ids import PeerId
    from triolet.sampling import Grammar

    from ..contract.generation import GenerationRequest
    from .frames import Again, Fault
    from .request import Attempt, Request
    from .status import Observer
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

    Attributes:
      tokens: retries that can be afforded, as of the last call.
    """

    def __init__(self, config: RecoveryConfig, now: float) -> None:
        self._config = config
        self.tokens = config.retry_burst
        self._filled_at = now
        # In the order of time: what was decided for each fault that several attempts share.
        self._decided: dict[Hashable, tuple[float, bool]] = {}

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
        is_affordable = self.tokens >= 1
        if is_affordable:
            self.tokens -= 1
        self._decided[fault] = (now, is_affordable)
        return is_affordable

    def _add(self, tokens: float) -> None:
        self.tokens = min(self.tokens + tokens, self._config.retry_burst)

    def _forget(self, now: float) -> None:
        while self._decided:
            fault = next(iter(self._decided))
            if now - self._decided[fault][0] <= ONE_FAULT_S:
                return
            del self._decided[fault]


class BrokenPaths:
    """Prefill and decode workers that lost one another, though both answer this server.

    A partition between two workers shows as a transfer that is given up; neither worker is at
    fault, so no breaker counts it. Pairs of lives, each for a while; no more than there are pairs.
    """

    def __init__(self, config: RecoveryConfig) -> None:
        self._avoid_s = config.path_avoid_s
        self._until: dict[tuple[PeerId | None, PeerId | None], float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def broke(self, prefill: Worker, decode: Worker, now: float) -> None:
        """Note that KV does not get from one to the other."""
        self._until[prefill.peer_id, decode.peer_id] = now + self._avoid_s

    def is_broken(self, prefill: Worker, decode: Worker, now: float) -> bool:
        """Return whether other workers should be paired instead."""
        until = self._until.get((prefill.peer_id, decode.peer_id))
        return until is not None and now < until

    def forget(self, now: float) -> None:
        """Drop what is long ago."""
        for path in [path for path, until in self._until.items() if until <= now]:
            del self._until[path]


MAX_EXPLAINED: Final = 1024
"""Events whose cause is known: at most three per quarantined request."""


class Recovery:
    """The memory of faults of one server.

    Args:
      config: bounds.
      workers: as of Requests.
      observer: told of what changes.
      now: the time of the start.

    Attributes:
      paths: pairs of workers that lost one another.
      budget: of retries; each accepted request pays a part of one in.
    """

    def __init__(
        self,
        config: ServerConfig,
        workers: Sequence[Worker],
        observer: Observer,
        now: float,
    ) -> None:
        self.paths = BrokenPaths(config.recovery)
        self._max_attempts = config.max_attempts
        self._workers = workers
        self._observer = observer
        self.budget = RetryBudget(config.recovery, now)
        self._prompts = Quarantine(config.recovery, prompt_digest)
        self._grammars = Quarantine(config.recovery, grammar_digest)
        self._explained: dict[Hashable, None] = {}
        self._shown: dict[Worker, BreakerState] = {}

    @property
    def num_quarantined(self) -> int:
        """Prompts and grammars that are refused."""
        return len(self._prompts) + len(self._grammars)

    def objection_to(self, request: GenerationRequest, now: float) -> outcome.Failure | None:
        """Return the end of a request with a prompt or grammar in quarantine; None for others."""
        grammar = request.sampling.grammar
        if grammar is not None:
            one = TenantGrammar(request.scheduling.tenant, grammar)
            if self._grammars.remaining_s(one, now) is not None:
                return outcome.grammar_too_costly()
        remaining_s = self._prompts.remaining_s(request.prompt_ids, now)
        return None if remaining_s is None else outcome.quarantined()

    def condemn(self, request: GenerationRequest, now: float) -> None:
        """Refuse the grammar of a request that held a worker up with it."""
        grammar = request.sampling.grammar
        if grammar is not None:
            self._grammars.add(TenantGrammar(request.scheduling.tenant, grammar), now)
            self._observer.quarantined("grammar", request.request_id.hex())

    def worked(self, worker: Worker, now: float) -> None:
        """Note that a worker did for an attempt what it is there for."""
        worker.breaker.succeeded(now)
        self._show(worker)

    def after(self, request: Request, again: Again, now: float) -> outcome.Failure | None:
        """Take in why the present attempt of a request is over.

        Returns:
          The end of the request, or None if it may be tried again.
        """
        attempt, fault = request.attempt, again.fault
        if fault is None or attempt is None:
            return None
        worker = attempt.pair.of(fault.at)
        event = _event(again.cause, fault, attempt)
        if self._is_anothers(event, fault, request, worker):
            return None
        if self.budget.is_new(event, now):
            self._count(worker, fault, attempt, now)
        if fault.is_workers:
            request.shunned |= {worker.address}
        num_tokens = len(request.relay.token_ids)
        request.faults.append(event)
        request.faulted_at = num_tokens
        if fault.num_suspects:
            is_prompt = attempt.pair.is_local and request.is_prefilling
            work = Role.PREFILL if is_prompt else fault.at
            if request.poison.strike(work, num_tokens, fault.num_suspects):
                self._quarantine(request, now)
                return outcome.quarantined()
        request.faults = [fault for fault in request.faults if fault not in self._explained]
        if len(request.faults) >= self._max_attempts:
            return Outcome.NO_WORKER.failure(
                f"{len(request.faults)} attempts failed, the last one: {_words(again.cause)}"
            )
        if not self.budget.take(event, now):
            self._observer.retry_unaffordable()
            return Outcome.NO_WORKER.failure(
                f"this attempt failed ({_words(again.cause)}), and too many others failed before it"
            )
        return None

    def advanced(self, request: Request) -> None:
        """Take in that a request has more tokens: one that gets on is no lost cause."""
        num_tokens = len(request.relay.token_ids)
        if request.faults and num_tokens - request.faulted_at >= CLEARING_TOKENS:
            request.faults.clear()
        if request.attempt is not None and request.poison.advanced(num_tokens):
            for worker in request.attempt.pair:
                share = worker.shares.get(request.attempt.key)
                if share is not None:
                    share.is_isolated = False

    def forget(self, worker: Worker) -> None:
        """Keep nothing of a worker that is no member any more."""
        self._shown.pop(worker, None)

    def sweep(self, now: float) -> None:
        """Let time pass."""
        self.budget.advance(now)
        self.paths.forget(now)
        for worker in self._workers:
            worker.breaker.advance(now)
            self._show(worker)

    def _is_anothers(self, event: Hashable, fault: Fault, request: Request, worker: Worker) -> bool:
        """Return whether an isolated request was there, which caused it. The ENDED of that request
        may be still to come."""
        if event in self._explained:
            return True
        if not fault.num_suspects or request.poison.isolated:
            return False
        # Not one that has just been sent there: it was in no step yet.
        is_decode = fault.at is Role.DECODE
        return any(
            share.is_isolated and (share.is_granted if is_decode else share.is_asked)
            for share in worker.shares.values()
        )

    def _quarantine(self, request: Request, now: float) -> None:
        """Refuse its prompt, and hold its failures against no other request."""
        self._prompts.add(request.spec.prompt_ids, now)
        for event in request.faults:
            self._explained[event] = None
        while len(self._explained) > MAX_EXPLAINED:
            del self._explained[next(iter(self._explained))]
        self._observer.quarantined("request", request.spec.request_id.hex())

    def _count(self, worker: Worker, fault: Fault, attempt: Attempt, now: float) -> None:
        """Hold a fault against a worker or a path. Attempts that it struck together count once."""
        if fault.is_path:
            self.paths.broke(attempt.pair.prefill, attempt.pair.decode, now)
        if fault.is_workers:
            worker.breaker.failed(now)
            self._show(worker)

    def _show(self, worker: Worker) -> None:
        state = worker.breaker.state
        if self._shown.get(worker, BreakerState.CLOSED) is not state:
            self._shown[worker] = state
            self._observer.breaker_changed(str(worker), state.value)


def _words(cause: str) -> str:
    return cause.replace("_", " ")


def _event(cause: str, fault: Fault, attempt: Attempt) -> Hashable:
    """Name what happened; what other attempts fail by as well has one name."""
    if not fault.is_shared:
        return attempt.key
    if fault.is_path:
        return (cause, attempt.pair.prefill.peer_id, attempt.pair.decode.peer_id)
    return (cause, attempt.pair.of(fault.at).peer_id, fault.step)


CLEARING_TOKENS: Final = 16
"""Tokens past the strike that clear: more than a dead worker can have computed of one stream that
this server has not seen."""
ISOLATING_STRIKES: Final = 2
QUARANTINING_STRIKES: Final = 3


class PoisonDetector:
    """The strikes of one request.

    Attributes:
      strikes: workers and steps that failed while they computed it, at one point of its text.
    """

    def __init__(self) -> None:
        self.strikes = 0
        self._role: Role | None = None
        self._struck_at = 0

    @property
    def isolated(self) -> bool:
        """Whether it must share no worker with another isolated request."""
        return self.strikes >= ISOLATING_STRIKES

    @property
    def is_of_prompt(self) -> bool:
        """Whether the cause of a failure may be in its prompt."""
        return self.strikes > 0 and self._role is Role.PREFILL

    def strike(self, role: Role, num_tokens: int, num_suspects: int) -> bool:
        """Note that a worker died, or its step raised, while it computed this request.

        Args:
          role: of the work: a prompt is prefill's, wherever it was computed.
          num_tokens: tokens that the request has.
          num_suspects: requests that computed there, this one included.

        Returns:
          Whether it is quarantined.
        """
        self.advanced(num_tokens)
        if role is not self._role:
            self.strikes = 0
        self._role = role
        if not self.strikes:
            self._struck_at = num_tokens
        self.strikes += 1
        enough = ISOLATING_STRIKES if num_suspects == 1 else QUARANTINING_STRIKES
        return self.strikes >= enough

    def advanced(self, num_tokens: int) -> bool:
        """Note how many tokens it has; return whether that ends an isolation."""
        if not self.strikes or num_tokens - self._struck_at < CLEARING_TOKENS:
            return False
        was_isolated, self.strikes = self.isolated, 0
        return was_isolated


T = TypeVar("T")


class TenantGrammar(NamedTuple):
    """A grammar as one tenant sends it: it is refused for no other tenant.

    Attributes:
      tenant: its name; empty where there are no tenants.
      grammar: that its request carries.
    """

    tenant: str
    grammar: Grammar


def prompt_digest(prompt_ids: Sequence[int]) -> bytes:
    """Return the digest by which a prompt is remembered."""
    return hashlib.blake2b(pack_tokens(prompt_ids), digest_size=16).digest()


def grammar_digest(one: TenantGrammar) -> bytes:
    """Return the digest by which a tenant's grammar is remembered."""
    text = f"{one.tenant}\n{one.grammar.kind}\n{one.grammar.text}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


class Quarantine(Generic[T]):
    """Refused prompts, or refused grammars.

    Args:
      config: how long, and how many at most.
      digest: by which one is remembered.
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
        """Return for how long one is still refused, or None if it is not."""
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
