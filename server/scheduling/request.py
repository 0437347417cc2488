"""Accepted requests: their phases, attempts and times; the table of live requests; and the
accounting: received == accepted + rejected, and accepted == ended + in flight.

A step that the transition table lacks raises and changes nothing. Losing a worker leads back to
QUEUED and through a new attempt. END leads from every phase to FINISHED, once. An embedding input
needs no decode lease: its attempt starts in PREFILLING and ends with the vector. Requests start and
end only here, so the accounting is right by construction.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from triolet.adapter_keys import cache_key
from triolet.errors import LocalProtocolError
from triolet.service_class import Band

from ..contract.generation import Failed, Finished, FinishReason, Usage
from ..contract.request_events import (
    RequestAccepted,
    RequestEnded,
    RequestEvents,
    RequestFacts,
    RequestRefused,
)
from .outcome import FINISHED, Outcome
from .output import Relay, is_background, window_of
from .poison import PoisonDetector
from .queue import QueuePlace
from .routing import Need, Why
from .workers import PrefixChain

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from transport.frames import TokenRow
    from triolet.config import ServerConfig
    from triolet.errors import RequestError
    from triolet.ids import AttemptKey
    from triolet.service_class import Scheduling

    from ..contract.generation import GenerationRequest
    from .outcome import Failure
    from .output import Mailbox, RelayEnd, RelayText
    from .routing import Pair
    from .wait_estimate import Forecast
    from .workers import Worker


class Phase(Enum):
    """The phase of a request."""

    QUEUED = auto()  # waits for workers with room
    RESERVING = auto()  # decode was asked for a lease
    PREFILLING = auto()  # lease granted; prefill, or decode itself, computes the prompt
    DECODING = auto()  # tokens arrive
    FINISHING = auto()  # decode is done; some tokens are still on their way
    FINISHED = auto()  # the terminal event was published


class Step(Enum):
    """What moves a request to another phase."""

    DISPATCH = auto()
    GRANT = auto()
    TOKEN = auto()
    COMPLETE = auto()  # decode reported the number of tokens
    RETRY = auto()  # the attempt is over, the request is not
    END = auto()  # any end: finished, failed, cancelled


TRANSITIONS: Final[dict[Phase, dict[Step, Phase]]] = {
    Phase.QUEUED: {
        Step.DISPATCH: Phase.RESERVING,
        Step.END: Phase.FINISHED,
    },
    Phase.RESERVING: {
        Step.GRANT: Phase.PREFILLING,
        Step.RETRY: Phase.QUEUED,
        Step.END: Phase.FINISHED,
    },
    Phase.PREFILLING: {
        Step.TOKEN: Phase.DECODING,
        Step.COMPLETE: Phase.FINISHING,
        Step.RETRY: Phase.QUEUED,
        Step.END: Phase.FINISHED,
    },
    Phase.DECODING: {
        Step.TOKEN: Phase.DECODING,
        Step.COMPLETE: Phase.FINISHING,
        Step.RETRY: Phase.QUEUED,
        Step.END: Phase.FINISHED,
    },
    Phase.FINISHING: {
        Step.TOKEN: Phase.FINISHING,
        Step.RETRY: Phase.QUEUED,
        Step.END: Phase.FINISHED,
    },
    Phase.FINISHED: {},
}


def after(phase: Phase, step: Step) -> Phase:
    """Return the phase that `step` leads to.

    Raises:
      LocalProtocolError: there is no such step from this phase.
    """
    try:
        return TRANSITIONS[phase][step]
    except KeyError:
        raise LocalProtocolError(f"{step.name} is not a step from {phase.name}") from None


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at a request, on one pair of workers.

    Attributes:
      key: request id and attempt number.
      pair: the workers.
      rank: priority sent to workers.
      grant_by: time by which decode must answer the RESERVE.
      allowed: token credit sent to decode: it may produce positions below this.
      local_tokens: decode computes the prompt if at most this many tokens have no KV there.
      why: reason if decode computes the prompt, and reason if it does not.
      fork_of: the attempt that it shares a prompt with, or None.
      kv_key: key that authenticates its KV in transit.
      early: rows that arrived before their predecessors, by position.
      gap_since: time since when a token is missing; None if none is.
      quiet_since: time when its credit was last repeated or needed no repetition.
      is_handed_over: decode has the KV; prefill is done.
      has_decoded: decode has sent a token.
      granted_at: time when decode granted the lease, or prefill was sent an input.
      first_token_at: time of prefill's first token.
      num_tokens: total completion tokens, once decode has reported them.
      finish_reason: the finish reason that decode reported.
      end: how the request ends, while it waits for prefill's FIRST_TOKEN to complete its usage.
    """

    key: AttemptKey
    pair: Pair
    rank: int
    grant_by: float
    allowed: int
    local_tokens: int = 0
    why: tuple[Why, Why] = (Why.OFF, Why.OFF)
    fork_of: AttemptKey | None = None
    kv_key: bytes = b""
    early: dict[int, TokenRow] = field(default_factory=dict)
    gap_since: float | None = None
    quiet_since: float = 0.0
    is_handed_over: bool = False
    has_decoded: bool = False
    granted_at: float | None = None
    first_token_at: float | None = None
    num_tokens: int | None = None
    finish_reason: FinishReason | None = None
    end: RelayEnd | None = None


@dataclass(slots=True)
class Times:
    """Times of a request's events by the server's monotonic clock; for `slow_gaps` see `Usage`."""

    submitted_at: float
    dispatched_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    slow_gaps: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """An accepted request until its terminal event.

    Attributes:
      spec: what the client asked for.
      facts: what its events report about it.
      order: number of acceptance; increasing.
      relay: its tokens and their text.
      output: holds the events for its reader.
      deadline: time when it ends in any case.
      times: times for usage and metrics.
      allowed: positions below this may be produced: tokens taken by the reader plus `window`.
      window: tokens it may run ahead of its reader.
      phase: the current phase.
      attempt: the current attempt; None while it waits.
      num_attempts: attempts started so far.
      faults: what attempts failed by since its last progress, except faults of other requests.
      faulted_at: its number of tokens at the last fault.
      poison: whether it crashes workers.
      shunned: addresses of workers where it failed; others are preferred.
      fingerprint: model that made its first token.
      zone: zone of the last attempt's decode worker.
      is_begun: a worker was told to compute its prompt.
      origin: another choice that it may share a prompt with, or None.
      cached_tokens: prompt tokens that were already cached; None until a worker reported it.
      held_tokens: those of them that decode had at the first attempt.
      forecast: the prediction made at admission.
      chain: names the prompt's blocks.
      turn: for an input, a number that increases with its index in the client's request.
      input_share: for an input, the share of prefill's credit that inputs may use; else 0.
      vector: for an input, the result.
      terminal: its terminal event, once it has ended.
      is_input: it is an embedding input: prefill computes it, without decode.
      is_background: it yields to all others.
      events: publishes its events.
    """

    spec: GenerationRequest
    facts: RequestFacts
    order: int
    relay: Relay
    deadline: float
    times: Times
    window: int
    events: RequestEvents
    allowed: int = field(init=False)
    phase: Phase = Phase.QUEUED
    attempt: Attempt | None = None
    num_attempts: int = 0
    faults: list[Hashable] = field(default_factory=list)
    faulted_at: int = 0
    poison: PoisonDetector = field(default_factory=PoisonDetector)
    shunned: frozenset[str] = frozenset()
    fingerprint: str = ""
    zone: str = ""
    is_begun: bool = False
    origin: Request | None = None
    cached_tokens: int | None = None
    held_tokens: int = 0
    forecast: Forecast | None = None
    chain: PrefixChain = field(init=False)
    output: Mailbox = field(init=False)
    turn: int = 0
    input_share: float = 0.0
    vector: bytes = b""
    terminal: Finished | Failed | None = None
    is_input: bool = field(init=False)
    is_background: bool = field(init=False)

    def __post_init__(self) -> None:
        # Computed once, because they are read for each token.
        self.is_input = self.spec.form is not None
        self.is_background = is_background(self.spec)
        self.allowed = self.window
        self.output = self.relay.mailbox
        self.chain = self._chain_of(self.spec.prompt_ids)

    def step(self, step: Step) -> None:
        """Move to another phase.

        Raises:
          LocalProtocolError: there is no such step from this phase.
        """
        self.phase = after(self.phase, step)

    @property
    def is_prefilling(self) -> bool:
        """Whether its prompt is being computed."""
        return self.phase is Phase.PREFILLING

    def needs(self, worker: Worker) -> bool:
        """Return whether losing this worker ends its current attempt."""
        attempt = self.attempt
        if attempt is None or worker not in attempt.pair:
            return False
        if attempt.end is not None:
            return True  # waits for prefill's FIRST_TOKEN, while decode holds its blocks
        return worker is attempt.pair.decode or not attempt.is_handed_over

    def computes_on(self, worker: Worker) -> bool:
        """Return whether this worker may be computing it now, judging by its tokens."""
        attempt = self.attempt
        if attempt is None or worker not in attempt.pair:
            return False
        if attempt.pair.is_local:
            return self.phase in (Phase.PREFILLING, Phase.DECODING)
        computing = Phase.PREFILLING if worker is attempt.pair.prefill else Phase.DECODING
        return self.phase is computing

    def began_before(self, when: float) -> bool:
        """Return whether decode had granted its current attempt by then."""
        attempt = self.attempt
        return attempt is not None and attempt.granted_at is not None and attempt.granted_at <= when

    def discount(self, pause_s: float) -> None:
        """Move its timeouts by a pause in which this server did not listen."""
        self.output.discount(pause_s)
        if self.attempt is not None:
            self.attempt.grant_by += pause_s
            if self.attempt.gap_since is not None:
                self.attempt.gap_since += pause_s

    @property
    def place(self) -> QueuePlace:
        """What determines its place in the queue."""
        spec = self.spec
        return QueuePlace(
            spec.scheduling,
            spec.priority,
            self.turn if self.is_input else self.deadline,
            self.order,
            len(spec.prompt_ids),
            spec.sampling.max_tokens,
        )

    @property
    def need(self) -> Need:
        """What its next attempt needs from workers."""
        prompt_tokens = len(self.spec.prompt_ids)
        return Need(
            prompt_tokens,
            prompt_tokens + len(self.relay.token_ids),
            self.fingerprint,
            self.shunned,
            self.poison.isolated,
            self.poison.is_of_prompt,
            self.chain,
            band=Band(self.spec.scheduling.service_class),
            input_share=self.input_share,
            adapter=self.spec.adapter,
            placement=self.spec.scheduling.placement,
        )

    @property
    def whole_chain(self) -> PrefixChain:
        """Names the blocks of prompt and completion, which the next turn of a chat starts with."""
        return self._chain_of((*self.spec.prompt_ids, *self.relay.token_ids))

    def _chain_of(self, token_ids: Sequence[int]) -> PrefixChain:
        return PrefixChain(token_ids, cache_key(self.spec.cache_salt, self.spec.adapter))

    def usage(self, now: float) -> Usage:
        """Return counts and times at `now`."""
        times = self.times
        until = now if times.dispatched_at is None else times.dispatched_at
        first = times.first_token_at
        reasoning = self.spec.sampling.reasoning
        return Usage(
            prompt_tokens=len(self.spec.prompt_ids),
            completion_tokens=len(self.relay.token_ids),
            # Decode's first tokens may overtake prefill's count; the end waits for it.
            cached_tokens=self.held_tokens if self.cached_tokens is None else self.cached_tokens,
            queue_s=until - times.submitted_at,
            ttft_s=None if first is None else first - times.submitted_at,
            reasoning_tokens=None
            if reasoning is None
            else reasoning.num_reasoning(self.relay.token_ids),
            slow_gaps=times.slow_gaps,
        )


MIN_SWEPT: Final = 128
SWEEP_TURNS: Final = 4
"""Sweeping all of a thousand requests every time would take a twentieth of a core."""
MAX_SWEPT: Final = 512
"""Requests swept at a time: half a millisecond, during which everything else waits. With more than
two thousand requests a round takes longer instead: ten thousand are swept once a second."""


@dataclass(slots=True)
class Accounting:
    """Counters since the server started.

    Attributes:
      accepted: requests that have or will get a terminal event.
      rejected: refused requests, by error code.
      ended: terminal events, by outcome.
    """

    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)

    def subscribe_to(self, events: RequestEvents) -> None:
        """Count these events from now on."""
        events.subscribe(RequestRefused, lambda event: self.rejected.update((event.code,)))
        events.subscribe(RequestAccepted, self._count_accepted)
        events.subscribe(RequestEnded, lambda event: self.ended.update((event.outcome,)))

    @property
    def received(self) -> int:
        """Requests that were submitted."""
        return self.accepted + self.rejected.total()

    def _count_accepted(self, event: RequestAccepted) -> None:
        del event
        self.accepted += 1

    def check(self, in_flight: int) -> None:
        """Raise unless the counts add up.

        Raises:
          LocalProtocolError: a request was lost or answered twice.
        """
        if self.accepted != self.ended.total() + in_flight:
            raise LocalProtocolError(f"terminal events do not add up, {in_flight} run: {self}")


class ValueCounts:
    """Counts values by upper bound. Cheap, because it runs for each token.

    Args:
      bounds: increasing upper bounds; infinity is added.

    Attributes:
      bounds: the bounds, including infinity.
      counts: number of values per bound, not cumulative.
      total: sum of the values.
      total: sum of the values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = [*map(float, bounds), float("inf")]
        self.counts = [0] * len(self.bounds)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


class RequestTable:
    """Live requests, and the accounting.

    Attributes:
      accounting: counts of what came and how it ended.
      model_digest: the model version for new requests; empty if it is in no store.
      text: the model's tokenizer.
      events: publishes request events, except those of silent requests.
    """

    def __init__(
        self,
        config: ServerConfig,
        text: RelayText,
        events: RequestEvents,
    ) -> None:
        self.accounting = Accounting()
        self._silence = RequestEvents()  # of silent requests, which only the accounting counts
        self.accounting.subscribe_to(events)
        self.accounting.subscribe_to(self._silence)
        self._config = config
        self.model_digest = config.model_digest
        self.text = text
        self.events = events
        self._requests: dict[bytes, Request] = {}
        self._unswept: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the live requests; they may end during iteration."""
        return iter(list(self._requests.values()))

    def __contains__(self, request_id: bytes) -> bool:
        return request_id in self._requests

    def next_swept(self) -> list[Request]:
        """Return the requests of this sweep: all if there are few, else a part, so that a round
        takes `SWEEP_TURNS` sweeps, or more if `MAX_SWEPT` limits them."""
        if not self._unswept:
            self._unswept = list(self._requests.values())
        count = min(max(MIN_SWEPT, -(-len(self._requests) // SWEEP_TURNS)), MAX_SWEPT)
        swept, self._unswept = self._unswept[:count], self._unswept[count:]
        return [request for request in swept if request.spec.request_id in self._requests]

    @property
    def has_unswept(self) -> bool:
        """Whether some requests have not had their turn in this round."""
        return bool(self._unswept)

    def of_attempt(self, request_id: bytes, number: int) -> Request | None:
        """Return the request of a current attempt; None for any other attempt."""
        request = self._requests.get(request_id)
        if request is None or request.attempt is None or request.attempt.key.attempt != number:
            return None
        return request

    def tenant_of(self, row: TokenRow) -> str:
        """Return a token's tenant; empty if its request is not live."""
        request = self._requests.get(row.request_id)
        return "" if request is None else request.spec.scheduling.claimant

    def origin_of(self, row: TokenRow) -> bytes:
        """Return the request_id of the first choice of a token's answer."""
        request = self._requests.get(row.request_id)
        return row.request_id if request is None else request.spec.origin_id or row.request_id

    def reject(
        self, scheduling: Scheduling, error: RequestError, *, is_silent: bool = False
    ) -> None:
        """Publish a refusal, and mark the error as counted."""
        error.is_of_queue = True
        refused = RequestRefused(
            error.code,
            scheduling.tenant,
            scheduling.service_class,
            error.status,
            self._config.model_name,
            self.model_digest,
        )
        (self._silence if is_silent else self.events).publish(refused)

    def accept(self, spec: GenerationRequest, now: float, *, turn: int = 0) -> Request:
        """Accept a request.

        Args:
          spec: what the client asked for.
          turn: for an input, a number that increases with its index in the client's request.
        """
        is_input = spec.form is not None
        facts = RequestFacts.of(spec, self._config.model_name, self.model_digest)
        taken = Request(
            spec=spec,
            facts=facts,
            order=self.accounting.accepted + 1,
            relay=Relay(spec, self.text),
            deadline=now + spec.deadline_s,
            times=Times(submitted_at=now),
            window=window_of(spec, self._config.token_window),
            events=self._silence if spec.is_silent else self.events,
            origin=self._requests.get(spec.origin_id),
            turn=turn,
            input_share=self._config.embedding.credit_share if is_input else 0.0,
        )
        self._requests[spec.request_id] = taken
        taken.events.publish(RequestAccepted(facts, spec.sampling.max_tokens))
        return taken

    def finish(self, request: Request, end: RelayEnd, now: float) -> None:
        """End a completion successfully."""
        terminal = Finished(
            end.reason,
            request.usage(now),
            end.stop_string,
            request.fingerprint,
            end.is_by_stop_token,
        )
        self._close(request, terminal, FINISHED[end.reason], now)

    def embedded(self, request: Request, vector: bytes, now: float) -> None:
        """End an input successfully."""
        request.vector = vector
        terminal = Finished(FinishReason.STOP, request.usage(now))
        self._close(request, terminal, Outcome.EMBEDDED, now)

    def fail(self, request: Request, failure: Failure, now: float) -> None:
        """End a request with a failure."""
        terminal = Failed(failure.error, request.usage(now))
        self._close(request, terminal, failure.outcome, now)

    def _close(
        self, request: Request, terminal: Finished | Failed, outcome: Outcome, now: float
    ) -> None:
        phase = request.phase
        request.step(Step.END)
        del self._requests[request.spec.request_id]
        usage, is_begun = terminal.usage, request.is_begun
        cost = request.events.price(request.spec.request_id, usage, is_begun=is_begun)
        request.events.publish(
            RequestEnded(
                request.facts,
                outcome.account,
                phase.name.lower(),
                usage,
                now - request.times.submitted_at,
                is_begun,
                cost,
                outcome.value.status,
                request.zone,
            )
        )
        request.terminal = terminal
        request.output.close(terminal, now)
