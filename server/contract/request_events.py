"""The life of a request, published once: `RequestEvents` hands each event to those that subscribed.

Events carry ids, labels, counts and times, never text. Metrics, the access log, the accounts of
tenants and the usage ledger subscribe (server/fleets.py); nothing else counts requests.
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

    from .generation import AutoChoice, GenerationRequest, RequestCost, Usage

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What all events of one sequence or input say of it.

    Attributes:
      request_id: its own.
      prompt_id: id of the first completion of the same prompt; its own unless it is another one.
      client_request_id: what its client calls it.
      model: public name of its model.
      model_digest: of the model's version; empty for a model in no store.
      adapter: digest of its LoRA adapter; empty for the base alone.
      tenant: empty where there are none.
      service_class: that it was scheduled in.
      is_input: it ends with a vector.
      auto: how its model was chosen; None where its client named it.
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

    @classmethod
    def of(cls, spec: GenerationRequest, model: str = "", model_digest: str = "") -> RequestFacts:
        """Return the facts of a request for a model's version."""
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
        )


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """A request was refused before anything was begun. It has no other event."""

    code: str
    tenant: str
    service_class: ServiceClass


@dataclass(frozen=True, slots=True)
class AnswerRepeated:
    """A request was answered with what was computed before. It has no other event."""

    request_id: bytes


@dataclass(frozen=True, slots=True)
class RequestAccepted:
    """A request was taken on: exactly one RequestEnded follows."""

    facts: RequestFacts
    max_tokens: int


@dataclass(frozen=True, slots=True)
class RequestDispatched:
    """Its first attempt begins, `queue_s` after it was submitted."""

    facts: RequestFacts
    queue_s: float


@dataclass(frozen=True, slots=True)
class FirstTokenArrived:
    """Its first token came, `ttft_s` after it was submitted."""

    facts: RequestFacts
    ttft_s: float


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt is over, and the request goes on with another one."""

    facts: RequestFacts
    cause: str


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """It got its terminal event.

    Attributes:
      facts: of the request.
      outcome: the column of the accounts.
      phase: where it was when it ended.
      usage: its own tokens and times.
      elapsed_s: since it was submitted.
      is_begun: a worker was asked to compute it.
      cost: what it is charged; None where nothing is.
    """

    facts: RequestFacts
    outcome: str
    phase: str
    usage: Usage
    elapsed_s: float
    is_begun: bool = True
    cost: RequestCost | None = None

    @property
    def counted(self) -> Usage:
        """Its usage in sums: of several completions the first counts their prompt."""
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
    """Charge nothing."""
    del request_id, usage, is_begun
    return None


class RequestEvents:
    """Hands each event to those that subscribed to its kind, in the order in which they did.

    Handlers are synchronous and quick: they run between two tokens. A handler that raises stops
    neither the request nor the other handlers.

    Args:
      price: returns what a request costs that ends.

    Attributes:
      price: as given.
    """

    def __init__(self, price: Callable[..., RequestCost | None] = no_price) -> None:
        self.price = price
        self._handlers: defaultdict[type, list[Callable[[Any], None]]] = defaultdict(list)
        self._failures: Counter[tuple[str, str]] = Counter()

    def subscribe(self, kind: type[E], handler: Callable[[E], None]) -> None:
        """Call a handler with each event of a kind from now on."""
        self._handlers[kind].append(handler)

    def publish(self, event: RequestEvent) -> None:
        """Call the handlers of an event."""
        for handler in self._handlers[type(event)]:
            try:
                handler(event)
            except Exception as error:  # noqa: BLE001 (whatever it is, streams go on)
                self._note_failure(handler, type(event), error)

    def _note_failure(self, handler: Callable[[Any], None], kind: type, error: Exception) -> None:
        """Log the first failure of a handler with a kind of event, then each tenfold count."""
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
