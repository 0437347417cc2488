"""One generation or vector as the API sees it: what is asked for, the events that come back, and
what it costs.

The contract between server/api (which writes answers), server/scheduling (where requests begin and
end) and server/tenants (which keeps the accounts).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

import msgspec

from triolet.sampling import SamplingParams
from triolet.service_class import DEFAULT_SCHEDULING, Scheduling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from triolet.errors import RequestError
    from triolet.pooling import VectorForm


NO_TOKENS: Final = SamplingParams(max_tokens=0)
"""Of a request for a vector."""


class FinishReason(StrEnum):
    """How a completion ended well; in the API's words."""

    STOP = "stop"
    LENGTH = "length"


class CancelReason(StrEnum):
    """Why a generation was ended from outside."""

    CLIENT_GONE = "client_gone"
    WENT_AWAY = "went_away"  # said so: a page that was left, or is loaded again
    STOPPED = "stopped"  # the client asked: WebSocket cancel, stop button
    STALLED = "stalled"
    DRAIN = "drain"


class CacheOutcome(StrEnum):
    """What came of asking for an answer that may have been given before."""

    HIT = "hit"
    MISS = "miss"  # computed, and kept if it comes to a good end
    BYPASS = "bypass"  # no function of the request, or of no one model


@dataclass(slots=True)
class CacheAsk:
    """What a client says of the response cache, and what came of that.

    Attributes:
      may_find: an answer that was given before will do; if not, only this one is kept.
      is_reproducible: the answer is a function of the request.
      outcome: set when the request is begun, where answers are kept at all.
      age_s: how long ago a hit was computed.
    """

    may_find: bool
    is_reproducible: bool
    outcome: CacheOutcome | None = None
    age_s: float = 0.0

    @property
    def headers(self) -> dict[str, str]:
        """What the client is told."""
        if self.outcome is None:
            return {}
        shown = {"x-triolet-cache": self.outcome.value}
        return shown | ({"age": str(int(self.age_s))} if self.outcome is CacheOutcome.HIT else {})


class TextWatch(Protocol):
    """Reads the text of one completion as it comes."""

    def push(self, text: str) -> bool:
        """Take more text; return whether the completion has to end behind it."""
        ...


class AutoChoice(NamedTuple):
    """How the model of a request that left it open was chosen.

    Attributes:
      reason: why this one, in one word.
      largest: name of the last model of the ladder.
    """

    reason: str
    largest: str


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. `n` choices are n of these.

    Attributes:
      request_id: 16 random bytes; what logs, frames and errors call it.
      prompt_ids: the whole prompt, at least one token.
      sampling: parameters with the seed already set.
      stop: stop strings; the text ends before the first that occurs.
      deadline_s: seconds from submission after which it ends with 504.
      priority: lower runs earlier among those of one tenant and class; 0 is normal.
      skip_special_tokens: leave special tokens out of the text.
      include_stop: keep the stop string in the text.
      client_request_id: what its client calls it; appears beside `request_id` in the log.
      cache_salt: requests share KV with those of the same salt; empty for the common one.
      origin_id: the request_id of another completion of the same prompt and salt, with which it may
        share KV while that runs; empty for none.
      scheduling: its tenant and class.
      key: names what is asked for, so that a client that comes back is known; 0 for the prompt
        itself.
      cache: whether its answer may be one that was given before; None for no. The choices of one
        request have one.
      watch: begins what ends the completion by its text, beside stop strings; None for nothing.
      form: of the vector that it ends with; None for a request for tokens.
      adapter: digest of the LoRA adapter that computes it; empty for the base alone.
      markers: tokens that the reader of the text has to see, and how the text shows each, whether
        special tokens are left out or not; None for no such tokens.
      auto: how its model was chosen; None where its client named it.
    """

    request_id: bytes
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline_s: float
    stop: tuple[str, ...] = ()
    priority: int = 0
    skip_special_tokens: bool = True
    include_stop: bool = False
    client_request_id: str = ""
    cache_salt: bytes = b""
    origin_id: bytes = b""
    scheduling: Scheduling = DEFAULT_SCHEDULING
    key: int = 0
    cache: CacheAsk | None = None
    markers: Mapping[int, str] | None = None
    watch: Callable[[], TextWatch] | None = None
    form: VectorForm | None = None
    auto: AutoChoice | None = None
    adapter: bytes = b""


def input_request(
    request_id: bytes,
    input_ids: tuple[int, ...],
    form: VectorForm,
    deadline_s: float,
    priority: int = 0,
    client_request_id: str = "",
    scheduling: Scheduling = DEFAULT_SCHEDULING,
    adapter: bytes = b"",
) -> GenerationRequest:
    """Return the request for the vector of one input."""
    return GenerationRequest(
        request_id,
        input_ids,
        NO_TOKENS,
        deadline_s,
        priority=priority,
        client_request_id=client_request_id,
        scheduling=scheduling,
        form=form,
        adapter=adapter,
    )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen token and its alternatives.

    Attributes:
      token_id: the id.
      text: its own text (may be a replacement character for part of one).
      raw: its own bytes.
      logprob: natural logarithm, before temperature and penalties.
      top: alternatives, best first, as (token_id, text, raw, logprob).
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[tuple[int, str, bytes, float], ...] = ()


class Delta(msgspec.Struct, frozen=True, gc=False):
    """New text. May be empty text with tokens whose characters are not complete yet.

    One is made for each token, hence no dataclass: it takes a tenth of the time.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and times of one sequence.

    Attributes:
      prompt_tokens: tokens in the prompt.
      completion_tokens: tokens generated, the end token included.
      cached_tokens: prompt tokens with KV that was already there.
      queue_s: from submission to dispatch.
      ttft_s: from submission to the first token, None if there was none.
      reasoning_tokens: completion tokens before the answer, markers not counted; None where the
        model does not reason.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    queue_s: float = 0.0
    ttft_s: float | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The one good end.

    Attributes:
      reason: why it came.
      usage: what it took.
      stop_string: that was found.
      fingerprint: of the model that made it; empty if that is not known.
      is_by_stop_token: a token of the client's `stop_token_ids` ended it, and none of the model's
        own end tokens.
    """

    reason: FinishReason
    usage: Usage
    stop_string: str | None = None
    fingerprint: str = ""
    is_by_stop_token: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether the model had not ended it."""
        is_stopped = self.stop_string is not None or self.is_by_stop_token
        return is_stopped or self.reason is FinishReason.LENGTH


@dataclass(frozen=True, slots=True)
class Failed:
    """The one bad end: the client is told of it in the form of the API."""

    error: RequestError
    usage: Usage


Event: TypeAlias = Delta | Finished | Failed
Events: TypeAlias = list[tuple[int, Event]]
"""Events of several choices, each with the index of its choice."""


class OutputReader(Protocol):
    """Takes the events of choices, or the ends of inputs."""

    def note_filled(self, index: int) -> None:
        """Note that one of them has events where it had none. It neither waits nor raises."""
        ...


class Generation(Protocol):
    """One choice of a running request, as its stream reads it."""

    @property
    def request(self) -> GenerationRequest:
        """What was asked for."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether a worker was ever asked to compute it."""
        ...

    @property
    def has_events(self) -> bool:
        """Whether events are here."""
        ...

    def attach(self, reader: OutputReader, index: int) -> None:
        """Tell a reader when events are here where there were none.

        Args:
          reader: that takes the events.
          index: by which it knows this choice.
        """
        ...

    def take_now(self) -> Sequence[Event]:
        """Return the events that are here, adjacent deltas merged into one; of many a part.

        Taking them is what gives the worker credit to go on. The last event is a Finished or a
        Failed.
        """
        ...

    def cancel(self, reason: CancelReason) -> None:
        """End it now, from anywhere, without waiting. Idempotent; nothing after a terminal event.

        The peer tasks send the END frames that free its blocks; its reader gets a Failed.
        """
        ...


class RequestCost(NamedTuple):
    """What a request costs, in thousand-millionths of the operator's currency.

    Attributes:
      nanos: charged for it.
      nanos_on_largest: what the same tokens would have cost on the last model of the ladder; None
        where its client named the model.
    """

    nanos: int
    nanos_on_largest: int | None = None
