"""Types of one generation or embedding: the request, its output events and its cost.

Shared by server/api, which writes responses, server/scheduling, which runs requests, and
server/tenants, which keeps accounts.
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
"""Sampling parameters of an embedding request."""


class FinishReason(StrEnum):
    """Why a completion ended normally, in the API's terms."""

    STOP = "stop"
    LENGTH = "length"


class CancelReason(StrEnum):
    """Why a generation was cancelled from outside."""

    CLIENT_GONE = "client_gone"
    WENT_AWAY = "went_away"  # a page reported that it was closed or reloaded
    STOPPED = "stopped"  # requested by the client: WebSocket cancel, stop button
    STALLED = "stalled"
    DRAIN = "drain"


class CacheOutcome(StrEnum):
    """The result of a cache lookup."""

    HIT = "hit"
    MISS = "miss"  # computed, and stored if it ends without an error
    BYPASS = "bypass"  # the answer is not determined by the request, or by one model


@dataclass(slots=True)
class CacheAsk:
    """A client's cache settings and the outcome.

    Attributes:
      may_find: whether a stored answer may be used; if False, the new answer is only stored.
      is_reproducible: whether the request determines the answer.
      outcome: set when the request starts, if the cache is enabled.
      age_s: age of the stored answer on a hit.
    """

    may_find: bool
    is_reproducible: bool
    outcome: CacheOutcome | None = None
    age_s: float = 0.0

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that report the outcome."""
        if self.outcome is None:
            return {}
        shown = {"x-triolet-cache": self.outcome.value}
        return shown | ({"age": str(int(self.age_s))} if self.outcome is CacheOutcome.HIT else {})


class TextWatch(Protocol):
    """Watches the text of one completion as it is generated."""

    def push(self, text: str) -> bool:
        """Add text; return whether the completion must end after it."""
        ...


class AutoChoice(NamedTuple):
    """How the model of a request with `model: auto` was chosen.

    Attributes:
      reason: one word that explains the choice.
      largest: name of the last model of the ladder.
    """

    reason: str
    largest: str


class AssignedVersion(NamedTuple):
    """The version that a route assigned to a user. Requests without one are no evidence about
    versions: an operator named theirs, a cap moved them, or their tenant is excluded.

    Attributes:
      model: public name.
      version: the version.
      user: the user's `user_hash`.
      chosen_at: Unix time of the choice; of several requests of a conversation, of the first one.
    """

    model: str
    version: str
    user: int
    chosen_at: float


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request to generate one sequence. `n` choices are n of these.

    Attributes:
      request_id: 16 random bytes; identifies it in logs, frames and errors.
      prompt_ids: the whole prompt, at least one token.
      sampling: parameters with the seed already set.
      stop: stop strings; the text ends before the first one found.
      deadline_s: seconds from submission until it fails with 504.
      priority: lower runs earlier within one tenant and class; 0 is normal.
      skip_special_tokens: whether to leave special tokens out of the text.
      include_stop: whether to keep the stop string in the text.
      client_request_id: the client's id for it; logged beside `request_id`.
      cache_salt: requests share KV only with those of the same salt; empty for the default.
      origin_id: request_id of another completion of the same prompt and salt whose KV it may share
        while that one runs; empty for none.
      scheduling: its tenant and class.
      key: identifies equal requests, so that a repeated one is recognized; 0 to use the prompt.
      cache: response cache settings, shared by the choices of one request; None to bypass it.
      watch: creates a watch that can end the completion by its text, beside stop strings; None for
        none.
      form: format of the resulting embedding; None for a text request.
      adapter: digest of the LoRA adapter; empty for the base model.
      is_streamed: whether its client gets tokens as they are generated.
      markers: tokens that the reader of the text must see, with their text, even if special tokens
        are skipped; None for none.
      auto: how its model was chosen; None if the client named it.
      assigned: the version that a route assigned; None if it is no evidence about versions.
      is_silent: it is the server's own test of a model version: nothing that subscribes to request
        events sees it, it costs nothing, and overload control does not learn from it.
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
    is_streamed: bool = False
    assigned: AssignedVersion | None = None
    is_silent: bool = False


def input_request(
    request_id: bytes,
    input_ids: tuple[int, ...],
    form: VectorForm,
    deadline_s: float,
    priority: int = 0,
    client_request_id: str = "",
    scheduling: Scheduling = DEFAULT_SCHEDULING,
    adapter: bytes = b"",
    assigned: AssignedVersion | None = None,
) -> GenerationRequest:
    """Return the request for the embedding of one input."""
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
        assigned=assigned,
    )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen token and its alternatives.

    Attributes:
      token_id: its id.
      text: its text alone; a replacement character if it is part of a character.
      raw: its bytes.
      logprob: natural logarithm, before temperature and penalties.
      top: alternatives, best first, as (token_id, text, raw, logprob).
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[tuple[int, str, bytes, float], ...] = ()


class Delta(msgspec.Struct, frozen=True, gc=False):
    """New text. The text may be empty while the tokens' characters are incomplete.

    One is created per token, so this is not a dataclass: a Struct takes a tenth of the time.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and times of one sequence.

    Attributes:
      prompt_tokens: tokens in the prompt.
      completion_tokens: tokens generated, including the end token.
      cached_tokens: prompt tokens whose KV was cached.
      queue_s: time from submission to dispatch.
      ttft_s: time from submission to the first token; None without one.
      reasoning_tokens: completion tokens before the answer, without markers; None if the model does
        not reason.
      slow_gaps: number of gaps between two tokens above the objective's threshold, except gaps in
        which the row waited for the client to read.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    queue_s: float = 0.0
    ttft_s: float | None = None
    reasoning_tokens: int | None = None
    slow_gaps: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The terminal event of a completed sequence.

    Attributes:
      reason: why it ended.
      usage: its token counts and times.
      stop_string: the stop string found.
      fingerprint: fingerprint of the model; empty if unknown.
      is_by_stop_token: whether one of the client's `stop_token_ids` ended it, rather than an end
        token of the model.
    """

    reason: FinishReason
    usage: Usage
    stop_string: str | None = None
    fingerprint: str = ""
    is_by_stop_token: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether a stop string, a stop token or the length limit ended it."""
        is_stopped = self.stop_string is not None or self.is_by_stop_token
        return is_stopped or self.reason is FinishReason.LENGTH


@dataclass(frozen=True, slots=True)
class Failed:
    """The terminal event of a failed sequence. The API reports its error to the client."""

    error: RequestError
    usage: Usage


Event: TypeAlias = Delta | Finished | Failed
Events: TypeAlias = list[tuple[int, Event]]
"""Events of several choices, each with the index of its choice."""


class OutputReader(Protocol):
    """Receives the events of choices, or the ends of inputs."""

    def note_filled(self, index: int) -> None:
        """Record that a choice or input has events where it had none. Must not wait or raise."""
        ...


class Generation(Protocol):
    """One choice of a running request, as seen by its stream."""

    @property
    def request(self) -> GenerationRequest:
        """The request."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether a worker was ever asked to compute it."""
        ...

    @property
    def has_events(self) -> bool:
        """Whether events are available."""
        ...

    def attach(self, reader: OutputReader, index: int) -> None:
        """Notify a reader when events become available.

        Args:
          reader: the reader of the events.
          index: the reader's index of this choice.
        """
        ...

    def take_now(self) -> Sequence[Event]:
        """Return available events, with adjacent deltas merged. May return only some of many.

        Taking events gives the worker credit to continue. The last event is a Finished or a Failed.
        """
        ...

    def cancel(self, reason: CancelReason) -> None:
        """End it now, without waiting, from any task. Idempotent; has no effect after a terminal
        event.

        The links send the END frames that free its blocks; its reader gets a Failed.
        """
        ...


class RequestCost(NamedTuple):
    """The cost of a request, in billionths of the operator's currency.

    Attributes:
      nanos: the amount charged.
      nanos_on_largest: what the same tokens would cost on the last model of the ladder; None if
        the client named the model.
    """

    nanos: int
    nanos_on_largest: int | None = None
