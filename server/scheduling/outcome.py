"""How requests end: a table with one row per outcome, and the failures that several callers
need."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from transport.frames import EndReason
from triolet.errors import RequestError, draining

from ..contract.generation import CancelReason, FinishReason

if TYPE_CHECKING:
    from triolet.config import ServerConfig
    from triolet.service_class import Placement


class OutcomeFacts(NamedTuple):
    """The properties of an outcome.

    Attributes:
      account: its name in counts, metrics and logs.
      end: the reason sent to workers.
      status: HTTP status; 499 is what proxies log for a client that closed first.
      code: error code; empty for a success.
      retry_after_s: Retry-After; None if a retry makes no sense.
      param: the request's field at fault.
      finish: a completion's finish reason; None for failures and embeddings.
    """

    account: str
    end: EndReason
    status: int = 200
    code: str = ""
    retry_after_s: float | None = None
    param: str | None = None
    finish: FinishReason | None = None


class Outcome(Enum):
    """Every way in which an accepted request ends."""

    STOP = OutcomeFacts("stop", EndReason.STOP, finish=FinishReason.STOP)
    LENGTH = OutcomeFacts("length", EndReason.LENGTH, finish=FinishReason.LENGTH)
    EMBEDDED = OutcomeFacts("embedded", EndReason.EMBEDDED)
    CLIENT_GONE = OutcomeFacts("client_gone", EndReason.CANCEL, 499, "cancelled")
    STOPPED = OutcomeFacts("stopped", EndReason.CANCEL, 499, "cancelled")
    STALLED = OutcomeFacts("stalled", EndReason.STALLED, 408, "request_timeout")
    DEADLINE = OutcomeFacts("deadline", EndReason.DEADLINE, 504, "deadline_exceeded")
    # Dropped before any work: the first token would be too late for the SLO or the deadline.
    EXPIRED = OutcomeFacts("expired", EndReason.DEADLINE, 503, "overloaded")
    EXPIRED_DEADLINE = OutcomeFacts("expired", EndReason.DEADLINE, 504, "deadline_exceeded")
    DRAIN = OutcomeFacts("drain", EndReason.DRAIN, 503, "draining", 1.0)
    DISMISSED = OutcomeFacts("dismissed", EndReason.CANCEL, 403, "permission_denied")
    NO_WORKER = OutcomeFacts("no_worker", EndReason.ERROR, 503, "no_worker", 2.0)
    QUARANTINED = OutcomeFacts("quarantined", EndReason.ERROR, 500, "quarantined")
    GRAMMAR_TOO_COSTLY = OutcomeFacts("quarantined", EndReason.ERROR, 400, "grammar_too_costly")
    TOO_LONG = OutcomeFacts(
        "refused", EndReason.ERROR, 400, "context_length_exceeded", None, param="max_tokens"
    )
    STUCK = OutcomeFacts("refused", EndReason.ERROR, 400, "invalid_request_error")
    ERROR = OutcomeFacts("error", EndReason.ERROR, 500, "server_error")

    @property
    def account(self) -> str:
        """Its name in counts, metrics and logs."""
        return self.value.account

    def failure(self, message: str) -> Failure:
        """Return this outcome as a failure with a message for the client."""
        row = self.value
        error = RequestError(
            message,
            status=row.status,
            code=row.code,
            param=row.param,
            retry_after_s=row.retry_after_s,
        )
        return Failure(self, error)


class Failure(NamedTuple):
    """An unsuccessful end.

    Attributes:
      outcome: the outcome.
      error: the client's error.
    """

    outcome: Outcome
    error: RequestError


FINISHED: Final = {one.value.finish: one for one in Outcome if one.value.finish is not None}
"""The outcome of each successful end of a completion."""


def cancelled(reason: CancelReason, config: ServerConfig) -> Failure:
    """Return the failure for a cancelled request."""
    match reason:
        case CancelReason.CLIENT_GONE | CancelReason.WENT_AWAY:
            return Outcome.CLIENT_GONE.failure("the client left")
        case CancelReason.STOPPED:
            return Outcome.STOPPED.failure("the client stopped the request")
        case CancelReason.STALLED:
            return stalled(config.stall_timeout_s)
        case CancelReason.DRAIN:
            return drained(draining())


def drained(error: RequestError) -> Failure:
    """Return the failure for a request cut off when its server or model stops."""
    return Failure(Outcome.DRAIN, error)


def stalled(stall_timeout_s: float) -> Failure:
    """Return the failure for a stream that its client does not read."""
    return Outcome.STALLED.failure(f"the client read nothing for {stall_timeout_s:g} s")


def no_worker_left(role: str, placement: Placement) -> Failure:
    """Return the failure for a request without workers."""
    return Outcome.NO_WORKER.failure(f"no {role} worker{placement} is available for this request")


def quarantined() -> Failure:
    """Return the failure for a request with a quarantined prompt."""
    return Outcome.QUARANTINED.failure(
        "this prompt made the workers that computed it fail; it is not tried again"
    )


def grammar_too_costly() -> Failure:
    """Return the failure for a request with a grammar that is too slow to evaluate."""
    return Outcome.GRAMMAR_TOO_COSTLY.failure(
        "the grammar or schema of this request takes too long to evaluate: its ambiguous or widely "
        "branching parts cost more with every token; simplify it"
    )
