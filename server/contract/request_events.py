"""Events in the life of a request, and `RequestEvents`, which passes them to subscribers.

Events carry ids, labels, counts and times, never text. Metrics, service level objectives, the
access log, tenant accounts and the usage ledger subscribe (server/fleets.py); nothing else counts
requests.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import structlog

from triolet.errors import said_by

if TYPE_CHECKING:
    from collections.abc import Callable

    from triolet.service_class import ServiceClass

    from .generation import AssignedVersion, AutoChoice, GenerationRequest, RequestCost, Usage

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Facts shared by all events of one sequence or input.

    Attributes:
      request_id: its id.
      prompt_id: id of the first completion of the same prompt; equal to `request_id` for that one.
      client_request_id: the client's id for it.
      model: public name of its model.
      model_digest: digest of the model's version; empty for a model that is not in a store.
      adapter: digest of its LoRA adapter; empty for the base model.
      tenant: empty without tenants.
      service_class: the class in which it was scheduled.
      is_input: whether it produces an embedding.
      auto: how its model was chosen; None if the client named it.
      is_streamed: whether its client gets tokens as they are generated.
      assigned: see GenerationRequest.
    """

    request_id: bytes
    prompt_id: bytes
    client_request_id: str
    model: str
    model_digest: str
    adapter: bytes
    tenant: str
    service_class: ServiceClass
    is_input: bool
    auto: AutoChoice | None
    is_streamed: bool = False
    assigned: AssignedVersion | None = None

    @classmethod
    def of(cls, spec: GenerationRequest, model: str = "", model_digest: str = "") -> RequestFacts:
        """Return the facts of a request to a model's version."""
        return cls(
            spec.request_id,
            spec.origin_id or spec.request_id,
            spec.client_request_id,
            model,
            model_digest,
            spec.adapter,
            spec.scheduling.tenant,
            spec.scheduling.service_class,
            spec.form is not None,
            spec.auto,
            spec.is_streamed,
            spec.assigned,
        )


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """A request was refused before it started. It has no other event."""

    code: str
    tenant: str
    service_class: ServiceClass
    status: int
    model: str
    model_digest: str


@dataclass(frozen=True, slots=True)
class AnswerRepeated:
    """A request was answered from the response cache. It has no other event."""

    request_id: bytes


@dataclass(frozen=True, slots=True)
class RequestAccepted:
    """A request was accepted. Exactly one RequestEnded follows."""

    facts: RequestFacts
    max_tokens: int


@dataclass(frozen=True, slots=True)
class RequestDispatched:
    """The request's first attempt starts, `queue_s` after submission, in the `zone` of its decode
    worker."""

    facts: RequestFacts
    queue_s: float
    zone: str = ""


@dataclass(frozen=True, slots=True)
class FirstTokenArrived:
    """The request's first token arrived, `ttft_s` after submission, from the `zone` of its decode
    worker."""

    facts: RequestFacts
    ttft_s: float
    zone: str = ""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt failed, and the request continues with another one."""

    facts: RequestFacts
    cause: str


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The request got its terminal event.

    Attributes:
      facts: the request's facts.
      outcome: the column of the accounts in which it counts.
      phase: its phase when it ended.
      usage: its token counts and times.
      elapsed_s: time since submission.
      is_begun: whether a worker was asked to compute it.
      cost: the amount charged; None if nothing is charged.
      status: HTTP status of the outcome, also of a stream whose headers said 200.
      zone: zone of the decode worker of its last attempt; empty without one.
    """

    facts: RequestFacts
    outcome: str
    phase: str
    usage: Usage
    elapsed_s: float
    is_begun: bool = True
    cost: RequestCost | None = None
    status: int = 200
    zone: str = ""

    @property
    def is_uneven(self) -> bool | None:
        """Whether more than 1 % of the times between two tokens were longer than the objective, of
        fewer than 100 any; None if it was no stream or had none."""
        num_gaps = self.usage.completion_tokens - 1
        if not self.facts.is_streamed or num_gaps <= 0:
            return None
        return self.usage.slow_gaps > num_gaps // 100

    @property
    def counted(self) -> Usage:
        """Its usage for totals: of several completions, only the first counts the prompt tokens."""
        if self.facts.prompt_id == self.facts.request_id:
            return self.usage
        return replace(self.usage, prompt_tokens=0, cached_tokens=0)


RequestEvent: TypeAlias = (
    RequestRefused
    | AnswerRepeated
    | RequestAccepted
    | RequestDispatched
    | FirstTokenArrived
    | AttemptFailed
    | RequestEnded
)
E = TypeVar("E", bound=RequestEvent)


def no_price(request_id: bytes, usage: Usage, *, is_begun: bool) -> RequestCost | None:
    """Return None: charge nothing."""
    del request_id, usage, is_begun
    return None


class RequestEvents:
    """Passes each event to the handlers subscribed to its kind, in order of subscription.

    Handlers are synchronous and must be quick: they run between two tokens. An exception in a
    handler stops neither the request nor the other handlers.

    Args:
      price: returns the cost of a request that ends.

    Attributes:
      price: see Args.
    """

    def __init__(self, price: Callable[..., RequestCost | None] = no_price) -> None:
        self.price = price
        self._handlers: defaultdict[type, list[Callable[[Any], None]]] = defaultdict(list)
        self._failures: Counter[tuple[str, str]] = Counter()

    def subscribe(self, kind: type[E], handler: Callable[[E], None]) -> None:
        """Call a handler with each event of a kind from now on."""
        self._handlers[kind].append(handler)

    def publish(self, event: RequestEvent) -> None:
        """Call the event's handlers."""
        for handler in self._handlers[type(event)]:
            try:
                handler(event)
            except Exception as error:  # noqa: BLE001 (streams must continue after any error)
                self._note_failure(handler, type(event), error)

    def _note_failure(self, handler: Callable[[Any], None], kind: type, error: Exception) -> None:
        """Log a handler's first failure with a kind of event, then its 10th, 100th and so on."""
        name = getattr(handler, "__qualname__", str(handler))
        self._failures[name, kind.__name__] += 1
        count = self._failures[name, kind.__name__]
        if count == 10 ** (len(str(count)) - 1):
            log.error(
                "request_event_handler_failed",
                handler=name,
                kind=kind.__name__,
                failures=count,
                error=said_by(error),
            )
