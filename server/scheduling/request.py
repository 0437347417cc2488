"""One accepted request: its phases and the steps between them, its attempt, its times.

A step that the table does not have raises and changes nothing. A request may go round: the loss of
a worker leads back to QUEUED and from there through a new attempt. END leads from everywhere to
FINISHED, once. An input (a request for a vector) needs no lease of decode: its attempt begins in
PREFILLING and ends with the vector.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from triolet.errors import LocalProtocolError
from triolet.service_class import Band

from ..contract.generation import Failed, Finished, Usage
from .poison import PoisonDetector
from .queue import Place
from .routing import Need, Why
from .workers import PrefixChain

if TYPE_CHECKING:
    from collections.abc import Hashable

    from transport.frames import TokenRow
    from triolet.ids import AttemptKey

    from ..contract.generation import FinishReason, GenerationRequest
    from .output import Relay, RelayEnd
    from .routing import Pair
    from .wait_estimate import Forecast
    from .workers import Worker


class Phase(Enum):
    """Where a request is."""

    QUEUED = auto()  # waits for workers with room
    RESERVING = auto()  # decode was asked for a lease
    PREFILLING = auto()  # decode granted it; prefill, or decode itself, computes the prompt
    DECODING = auto()  # tokens arrive
    FINISHING = auto()  # decode is done, some of its tokens are still under way
    FINISHED = auto()  # one terminal event was given out


class Step(Enum):
    """What moves it."""

    DISPATCH = auto()
    GRANT = auto()
    TOKEN = auto()
    COMPLETE = auto()  # decode says how many tokens there are
    RETRY = auto()  # this attempt is over, the request is not
    END = auto()  # any terminal: finished, failed, cancelled


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
      LocalProtocolError: there is no such step from here.
    """
    try:
        return TRANSITIONS[phase][step]
    except KeyError:
        raise LocalProtocolError(f"{step.name} is not a step from {phase.name}") from None


@dataclass(slots=True, eq=False)
class Attempt:
    """One try, on one pair of workers.

    Attributes:
      key: request and attempt number.
      pair: where it runs.
      rank: what workers are told of how early it goes.
      grant_by: decode has to answer the RESERVE by then.
      allowed: positions below this decode was told it may produce.
      local_tokens: decode computes the prompt if no more than these have no KV there.
      why: decode does so, and why it does not.
      fork_of: the attempt whose prompt it shares; None for none.
      kv_key: by which its KV is authenticated on its way.
      early: rows whose predecessors are still under way, by position.
      gap_since: since when something is missing; None if nothing is.
      quiet_since: when its credit was repeated last, or there was none to repeat.
      is_handed_over: decode has the KV, prefill's part is done.
      has_decoded: decode has sent a token.
      granted_at: when decode granted the lease, or prefill was asked for a vector.
      first_token_at: when prefill's first token came.
      num_tokens: completion tokens there are in all, once decode has said so.
      finish_reason: how decode said that it ended.
      end: how the sequence ends, once prefill's FIRST_TOKEN has said what its usage lacks.
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
    """When what happened, by the server's monotonic clock."""

    submitted_at: float
    dispatched_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None


@dataclass(slots=True, eq=False)
class Request:
    """An accepted request until its terminal event.

    Attributes:
      request: what was asked for.
      order: rises with each accepted request.
      relay: its tokens, text and reader.
      deadline: when it ends whatever it has.
      times: for usage and metrics.
      allowed: positions below this may be produced: what the reader took, and a window.
      phase: where it is.
      attempt: the present try; None while it waits.
      num_attempts: tries begun so far.
      faults: what tries failed by since its last progress, unless another request caused it.
      faulted_at: tokens that it had at the last of them.
      poison: whether it makes workers fail.
      shunned: addresses of workers where it failed; others are preferred.
      fingerprint: of the model that made its first token.
      is_begun: a worker was told to compute its prompt.
      origin: another completion of the same prompt, which it may share; None for none.
      cached_tokens: prompt tokens with KV in the cache already; None before a worker has said so.
      held_tokens: of these, what decode had at the first attempt.
      forecast: what admission expected of it.
      chain: names the prompt's blocks.
      turn: of an input, rises with its place in its client's request.
      input_share: of an input, the share of prefill's credit that inputs may have; else 0.
      vector: of an input, once it is there.
      terminal: its end, once it is there.
    """

    request: GenerationRequest
    order: int
    relay: Relay
    deadline: float
    times: Times
    allowed: int
    phase: Phase = Phase.QUEUED
    attempt: Attempt | None = None
    num_attempts: int = 0
    faults: list[Hashable] = field(default_factory=list)
    faulted_at: int = 0
    poison: PoisonDetector = field(default_factory=PoisonDetector)
    shunned: frozenset[str] = frozenset()
    fingerprint: str = ""
    is_begun: bool = False
    origin: Request | None = None
    cached_tokens: int | None = None
    held_tokens: int = 0
    forecast: Forecast | None = None
    chain: PrefixChain = field(init=False)
    turn: int = 0
    input_share: float = 0.0
    vector: bytes = b""
    terminal: Finished | Failed | None = None

    def __post_init__(self) -> None:
        self.chain = PrefixChain(self.request.prompt_ids, self.request.cache_salt)

    def step(self, step: Step) -> None:
        """Move on.

        Raises:
          LocalProtocolError: the table has no such step from here.
        """
        self.phase = after(self.phase, step)

    @property
    def is_prefilling(self) -> bool:
        """Whether its prompt is being computed."""
        return self.phase is Phase.PREFILLING

    @property
    def is_input(self) -> bool:
        """Whether it ends with a vector: prefill computes it, and decode is not asked."""
        return self.request.form is not None

    def needs(self, worker: Worker) -> bool:
        """Return whether its present attempt is over without this worker."""
        attempt = self.attempt
        if attempt is None or worker not in attempt.pair:
            return False
        if attempt.end is not None:
            return True  # it waits for prefill's FIRST_TOKEN, and decode holds its blocks
        return worker is attempt.pair.decode or not attempt.is_handed_over

    def computes_on(self, worker: Worker) -> bool:
        """Return whether this worker may be computing it now, as far as its tokens tell."""
        attempt = self.attempt
        if attempt is None or worker not in attempt.pair:
            return False
        if attempt.pair.is_local:
            return self.phase in (Phase.PREFILLING, Phase.DECODING)
        computing = Phase.PREFILLING if worker is attempt.pair.prefill else Phase.DECODING
        return self.phase is computing

    def began_before(self, when: float) -> bool:
        """Return whether decode had its present attempt by then."""
        attempt = self.attempt
        return attempt is not None and attempt.granted_at is not None and attempt.granted_at <= when

    def discount(self, pause_s: float) -> None:
        """Take back time in which this server did not listen, to its reader and its workers."""
        self.relay.mailbox.discount(pause_s)
        if self.attempt is not None:
            self.attempt.grant_by += pause_s
            if self.attempt.gap_since is not None:
                self.attempt.gap_since += pause_s

    @property
    def place(self) -> Place:
        """What the queue has to know of it."""
        request = self.request
        return Place(
            request.scheduling,
            request.priority,
            self.turn if self.is_input else self.deadline,
            self.order,
            len(request.prompt_ids),
            request.sampling.max_tokens,
        )

    @property
    def need(self) -> Need:
        """What its next attempt asks of workers."""
        prompt_tokens = len(self.request.prompt_ids)
        return Need(
            prompt_tokens,
            prompt_tokens + len(self.relay.token_ids),
            self.fingerprint,
            self.shunned,
            self.poison.isolated,
            self.poison.is_of_prompt,
            self.chain,
            band=Band(self.request.scheduling.service_class),
            input_share=self.input_share,
        )

    @property
    def whole_chain(self) -> PrefixChain:
        """Names the blocks of prompt and completion, with which the next turn of a chat begins."""
        token_ids = (*self.request.prompt_ids, *self.relay.token_ids)
        return PrefixChain(token_ids, self.request.cache_salt)

    def usage(self, now: float) -> Usage:
        """Return counts and times as of now."""
        times = self.times
        until = now if times.dispatched_at is None else times.dispatched_at
        first = times.first_token_at
        reasoning = self.request.sampling.reasoning
        return Usage(
            prompt_tokens=len(self.request.prompt_ids),
            completion_tokens=len(self.relay.token_ids),
            # Decode's first tokens may overtake prefill's, which says how many; the end waits.
            cached_tokens=self.held_tokens if self.cached_tokens is None else self.cached_tokens,
            queue_s=until - times.submitted_at,
            ttft_s=None if first is None else first - times.submitted_at,
            reasoning_tokens=None
            if reasoning is None
            else reasoning.num_reasoning(self.relay.token_ids),
        )
