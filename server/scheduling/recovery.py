"""Fault handling: the retry budget, circuit breakers of workers and zones, and the quarantine of
prompts that crash workers. Read it when a retry is refused, or a worker or zone gets no requests.

The retry budget is a token bucket. Every accepted request adds a tenth of a retry, and time adds a
little, so that a small fleet can recover at all; the bucket holds a burst. Retries cost:

* Attempts that fail together through one event cost one token: the loss of a worker, a device step
  that raised, a broken path between two workers, a silence after which a worker gave up leases. So
  the death of a worker costs one token, however many streams it had.
* Every other failed attempt costs one token: a RESERVE without an answer, tokens that never came,
  an error from a worker. Retries can multiply these faults.

A refusal for lack of capacity, a preemption and a drain are not faults and cost nothing. If the
budget does not cover a retry, the request ends with an error.

A request that may crash workers is struck (poison.py). A blamed one waits until the lost worker
answers. Quarantine applies to the prompt within its tenant only, so no tenant can get a prompt
refused to another one.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from transport.tokens import pack_tokens
from triolet.fair_lru import FairLru, Keeper
from triolet.ids import Role
from triolet.units import SECONDS

from ..contract.generation import Finished
from . import outcome
from .outcome import Outcome
from .poison import CLEARING_TOKENS
from .workers import BreakerState, BrokenPaths

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from triolet.config import RecoveryConfig, ServerConfig
    from triolet.ids import PeerId

    from ..contract.generation import GenerationRequest
    from .frames import Again, FrameFault
    from .request import Attempt, Request
    from .status import Observer
    from .workers import Worker


ONE_FAULT_S: Final = 2 * SECONDS
"""Attempts that fail by the same event within this time count as one fault. The effects of one
event arrive within moments; a path or a lease cannot break a second time before two seconds
(`kv_stall_s`, `lease_ttl_s`)."""


class RetryBudget:
    """One server's retry budget.

    Args:
      config: rates and size of the bucket.
      now: the start time; the bucket starts full.

    Attributes:
      tokens: retries that can be afforded, updated by each call.
    """

    def __init__(self, config: RecoveryConfig, now: float) -> None:
        self._config = config
        self.tokens = config.retry_burst
        self._filled_at = now
        # Decisions for faults that several attempts share, in order of time.
        self._decided: dict[Hashable, tuple[float, bool]] = {}

    def earn(self) -> None:
        """Add the share of an accepted request."""
        self._add(self._config.retry_share)

    def advance(self, now: float) -> None:
        """Add the share of the time passed."""
        self._add((now - self._filled_at) * self._config.retry_floor_per_s)
        self._filled_at = now

    def is_new(self, fault: Hashable, now: float) -> bool:
        """Return whether this fault has not been paid for recently."""
        self._forget(now)
        return fault not in self._decided

    def take(self, fault: Hashable, now: float) -> bool:
        """Pay for a retry; return False if it cannot be afforded.

        Args:
          fault: identifies the event; attempts that fail by the same one get the same answer.
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


MAX_EVICTED: Final = 64
"""Most silent zones to remember, counted per model. A zone without workers is remembered too,
because its workers may return."""


class ZoneBreakers:
    """Circuit breakers of zones in which all workers fell silent, by zone and model.

    A zone is evicted after `zone_evict_s` of silence. When one of its workers answers again, each
    gets `zone_return_share` of its usual work, and the same amount more after every
    `zone_return_s`. This applies only while another zone decodes the model: a server that is cut
    off itself would otherwise hold back all workers.

    Args:
      config: times and shares.
      workers: the fleet's workers, shared with `Requests`.
      observer: receives events.

    Attributes:
      back_at: since when a worker of a zone answers again; None while all are silent.
    """

    def __init__(
        self, config: RecoveryConfig, workers: Sequence[Worker], observer: Observer
    ) -> None:
        self._config = config
        self._workers = workers
        self._observer = observer
        # Time since which a worker answers again; None while all are silent.
        self.back_at: dict[tuple[str, str], float | None] = {}

    def advance(self, now: float) -> None:
        """Advance to `now`; call at every sweep."""
        if not self.back_at and not any(worker.is_missed for worker in self._workers):
            return
        zones: dict[tuple[str, str], list[Worker]] = {}
        for worker in self._workers:
            if worker.site.zone and worker.fingerprint:
                zones.setdefault((worker.site.zone, worker.fingerprint), []).append(worker)
        serving = {
            (worker.site.zone, worker.fingerprint)
            for worker in self._workers
            if worker.role is Role.DECODE and worker.is_connected
        }.difference(self.back_at)
        for key, members in zones.items():
            others = any(model == key[1] and zone != key[0] for zone, model in serving)
            share = self._share(key, members, now) if others else 1.0
            if share >= 1.0 and key in self.back_at:
                del self.back_at[key]
                self._observer.breaker_changed(f"zone {key[0]}", BreakerState.CLOSED.value)
            for worker in members:
                worker.breaker.confine(share, now)
        while len(self.back_at) > MAX_EVICTED:
            del self.back_at[next(iter(self.back_at))]

    def _share(self, key: tuple[str, str], members: Sequence[Worker], now: float) -> float:
        """Return the share of its usual work that a zone gets."""
        config, is_back = self._config, any(worker.is_connected for worker in members)
        silences = [worker.monitor.silence_s(now) for worker in members if worker.is_missed]
        if not is_back and silences and min(silences) >= config.zone_evict_s:
            if self.back_at.get(key, now) is not None:
                self.back_at[key] = None
                self._observer.breaker_changed(f"zone {key[0]}", BreakerState.OPEN.value)
        elif key not in self.back_at:
            return 1.0
        elif is_back and self.back_at[key] is None:
            self.back_at[key] = now
            self._observer.breaker_changed(f"zone {key[0]}", BreakerState.HALF_OPEN.value)
        back_at = self.back_at[key]
        num_steps = 0 if back_at is None else int((now - back_at) / config.zone_return_s)
        return config.zone_return_share * (1 + num_steps)


MAX_EXPLAINED: Final = 1024
"""Events with a known cause: at most three per blamed request."""


class Recovery:
    """One server's record of faults.

    Args:
      config: bounds.
      workers: the fleet's workers, shared with `Requests`.
      observer: receives events.

    Attributes:
      paths: pairs of workers that lost each other.
      budget: the retry budget.
    """

    def __init__(
        self,
        config: ServerConfig,
        workers: Sequence[Worker],
        observer: Observer,
        now: float,
    ) -> None:
        self.paths = BrokenPaths(config.recovery)
        self._config = config
        self._workers = workers
        self._observer = observer
        self.budget = RetryBudget(config.recovery, now)
        self._zones = ZoneBreakers(config.recovery, workers, observer)
        self._prompts = Quarantine(config.recovery, lambda one: pack_tokens(one.prompt_ids))
        self._grammars = Quarantine(
            config.recovery, lambda one: repr(one.sampling.grammar).encode()
        )
        self._explained: dict[Hashable, Request] = {}
        # Per worker that may have died: the requests struck by its last epoch, and that epoch.
        self._given_up: dict[Worker, dict[Request, PeerId]] = {}
        self._shown: dict[Worker, BreakerState] = {}

    @property
    def lost_zones(self) -> frozenset[str]:
        """Zones of which no worker answers, or which are returning to their usual work. A zone that
        serves another version now, or has left, is not lost."""
        members = {(one.site.zone, one.fingerprint) for one in self._workers if not one.is_leaving}
        return frozenset(zone for zone, _ in members.intersection(self._zones.back_at))

    @property
    def num_quarantined(self) -> int:
        """Number of refused prompts and grammars."""
        return len(self._prompts) + len(self._grammars)

    def objection_to(self, request: GenerationRequest, now: float) -> outcome.Failure | None:
        """Return the failure for a request with a quarantined prompt or grammar; else None."""
        if self._grammars.refuses(request, now):
            return outcome.grammar_too_costly()
        return outcome.quarantined() if self._prompts.refuses(request, now) else None

    def condemn(self, request: GenerationRequest, now: float) -> None:
        """Quarantine the grammar of a request that stalled a worker."""
        if request.sampling.grammar is not None:
            self._grammars.add(request, now)
            self._observer.quarantined("grammar", request.request_id.hex())

    def worked(self, worker: Worker, now: float) -> None:
        """Record a worker's success with an attempt."""
        worker.breaker.succeeded(now)
        self._show(worker)

    def after(self, request: Request, again: Again, now: float) -> outcome.Failure | None:
        """Apply the reason why a request's attempt ended.

        Returns:
          The request's failure; None if it may be retried.
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
            request.poison.strike(
                work, num_tokens, fault.num_suspects, event if fault.step else worker.peer_id
            )
            if not fault.step and worker.peer_id is not None:
                self._given_up.setdefault(worker, {})[request] = worker.peer_id
            if request.poison.is_blamed:
                self._explained.update(dict.fromkeys(request.faults, request))
                while len(self._explained) > MAX_EXPLAINED:
                    del self._explained[next(iter(self._explained))]
        request.faults = [
            one for one in request.faults if self._explained.get(one, request) is request
        ]
        cause = again.cause.replace("_", " ")
        # One that awaits an answer gets another attempt only if the answer clears it or never
        # comes.
        if len(request.faults) >= self._config.max_attempts + self.awaits_answer(request, now):
            return Outcome.NO_WORKER.failure(
                f"{len(request.faults)} attempts failed, the last one: {cause}"
            )
        if not self.budget.take(event, now):
            self._observer.retry_unaffordable()
            return Outcome.NO_WORKER.failure(
                f"this attempt failed ({cause}), and too many others failed before it"
            )
        return None

    def advanced(self, request: Request) -> None:
        """Record a request's progress, which clears its faults."""
        num_tokens = len(request.relay.token_ids)
        if request.faults and num_tokens - request.faulted_at >= CLEARING_TOKENS:
            request.faults.clear()
        if request.attempt is not None and request.poison.advanced(num_tokens):
            for worker in request.attempt.pair:
                share = worker.shares.get(request.attempt.key)
                if share is not None:
                    share.is_isolated = False

    def answered(self, worker: Worker, now: float) -> None:
        """Settle strikes when a worker answers: its epoch tells whether the lost process died. One
        still in the step for which it was given up may yet die of it."""
        if worker.peer_id is None or worker.monitor.is_stuck:
            return
        for request, life in self._given_up.pop(worker, {}).items():
            has_died = not worker.peer_id.is_process_of(life)
            is_convicted = request.poison.settle(life, has_died=has_died)
            if is_convicted and not isinstance(request.terminal, Finished):
                self._prompts.add(request.spec, now)
                self._observer.quarantined("request", request.spec.request_id.hex())

    def awaits_answer(self, request: Request, now: float) -> bool:
        """Return whether an answer may soon clear or convict a blamed request. Until then it must
        not start, because it could cost one more worker."""
        return request.poison.is_blamed and any(
            request in struck
            and now - (worker.missing_since or now) < self._config.routing.suspect_grace_s
            for worker, struck in self._given_up.items()
        )

    def forget(self, worker: Worker) -> None:
        """Drop the record of a worker that left the fleet."""
        self._shown.pop(worker, None)
        self._given_up.pop(worker, None)

    def sweep(self, now: float) -> None:
        """Advance to `now`."""
        self.budget.advance(now)
        self.paths.forget(now)
        for worker in self._workers:
            worker.breaker.advance(now)
            self._show(worker)
        self._zones.advance(now)

    def _is_anothers(
        self, event: Hashable, fault: FrameFault, request: Request, worker: Worker
    ) -> bool:
        """Return whether an isolated request on the worker caused this. That request's ENDED may
        not have arrived yet."""
        if self._explained.get(event, request) is not request:
            return True
        if not fault.num_suspects or request.poison.isolated:
            return False
        # Not one that was only just sent there: it was in no step yet.
        is_decode = fault.at is Role.DECODE
        return any(
            share.is_isolated and (share.is_granted if is_decode else share.is_asked)
            for share in worker.shares.values()
        )

    def _count(self, worker: Worker, fault: FrameFault, attempt: Attempt, now: float) -> None:
        """Count a fault against a worker or a path, once for all attempts that it struck."""
        if fault.is_path:
            self.paths.broke(attempt.pair.prefill, attempt.pair.decode, now)
        if fault.is_workers:
            worker.breaker.failed(now)
            self._observer.incident(worker.address)
            self._show(worker)

    def _show(self, worker: Worker) -> None:
        state = worker.breaker.state
        if self._shown.get(worker, BreakerState.CLOSED) is not state:
            self._shown[worker] = state
            self._observer.breaker_changed(str(worker), state.value)


def _event(cause: str, fault: FrameFault, attempt: Attempt) -> Hashable:
    """Identify the event. Attempts that fail by the same event get the same value."""
    if not fault.is_shared:
        return attempt.key
    if fault.is_path:
        return (cause, attempt.pair.prefill.peer_id, attempt.pair.decode.peer_id)
    return (cause, attempt.pair.of(fault.at).peer_id, fault.step)


class Quarantine:
    """Refused prompts or grammars, each for one tenant.

    Args:
      config: duration, and maximum number.
      refused: returns the refused part of a request.
    """

    def __init__(
        self, config: RecoveryConfig, refused: Callable[[GenerationRequest], bytes]
    ) -> None:
        self._refused = refused
        self._config = config
        # By tenant and digest, ordered by expiry.
        self._until: dict[tuple[bytes, bytes], float] = {}
        self._of_tenants: FairLru[tuple[bytes, bytes]] = FairLru()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, request: GenerationRequest, now: float) -> None:
        """Refuse this request's prompt or grammar to its tenant from now on."""
        name = self._name(request)
        if self._until.pop(name, None) is None:
            self._of_tenants.add([name], Keeper(name[0]))
        else:
            self._of_tenants.touch(name, name[0])
        self._until[name] = now + self._config.quarantine_s
        if len(self._until) > self._config.max_quarantined:
            del self._until[self._of_tenants.pop()]

    def refuses(self, request: GenerationRequest, now: float) -> bool:
        """Return whether a request's prompt or grammar is refused to its tenant."""
        while self._until and self._until[name := next(iter(self._until))] <= now:
            del self._until[name]
            self._of_tenants.remove([name], name[0])
        # The usual case is an empty table, and hashing long prompts takes time.
        if not self._until or not self._of_tenants.held_by(request.scheduling.tenant.encode()):
            return False
        return self._name(request) in self._until

    def _name(self, request: GenerationRequest) -> tuple[bytes, bytes]:
        digest = hashlib.blake2b(self._refused(request), digest_size=16).digest()
        return request.scheduling.tenant.encode(), digest
