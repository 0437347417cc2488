"""How requests end: a table with one row per outcome, and the failures of several callers."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from transport.frames import EndReason
from triolet.errors import RequestError, draining

from ..contract.generation import CancelReason, FinishReason

if TYPE_CHECKING:
    from triolet.config import ServerConfig


class OutcomeFacts(NamedTuple):
    """What an outcome is to everyone.

    Attributes:
      account: its column in accounts, metrics and logs.
      end: what workers are told.
      status: HTTP status; 499 is what proxies log for a client that closed first.
      code: error code; empty for a good end.
      retry_after_s: after which a retry makes sense; None for never.
      param: the field of the request that is at fault.
      finish: the finish reason of a completion; None for a bad end, and for a vector.
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
    # Dropped before anything was spent: the first token would be too late for the SLO or deadline.
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
        """Its column in accounts, metrics and logs."""
        return self.value.account

    def failure(self, message: str) -> Failure:
        """Return this outcome with the error for the client."""
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
    """One bad end.

    Attributes:
      outcome: its row.
      error: for the client.
    """

    outcome: Outcome
    error: RequestError


FINISHED: Final = {one.value.finish: one for one in Outcome if one.value.finish is not None}
"""The outcome of each good end of a completion."""


def cancelled(reason: CancelReason, config: ServerConfig) -> Failure:
    """Return the end that was asked for from outside."""
    match reason:
        case CancelReason.CLIENT_GONE | CancelReason.WENT_AWAY:
            return Outcome.CLIENT_GONE.failure("the client left")
        case CancelReason.STOPPED:
            return Outcome.STOPPED.failure("the client stopped it")
        case CancelReason.STALLED:
            return stalled(config.stall_timeout_s)
        case CancelReason.DRAIN:
            return drained(draining())


def drained(error: RequestError) -> Failure:
    """Return the end of a request that still runs when the server or its model has to stop."""
    return Failure(Outcome.DRAIN, error)


def stalled(stall_timeout_s: float) -> Failure:
    """Return the end of a stream that is not read."""
    return Outcome.STALLED.failure(f"the client read nothing for {stall_timeout_s:g} s")


def no_worker_left(role: str) -> Failure:
    """Return the end of a request that waited for workers in vain."""
    return Outcome.NO_WORKER.failure(f"no {role} worker is there to take this request")


def quarantined() -> Failure:
    """Return the end of a request whose prompt made workers fail, and of others with it."""
    return Outcome.QUARANTINED.failure(
        "this prompt made the workers that computed it fail; it is not tried again"
    )


def grammar_too_costly() -> Failure:
    """Return the end of a request with a grammar that takes a worker too long, and of every
    other of its tenant with that grammar."""
    return Outcome.GRAMMAR_TOO_COSTLY.failure(
        "the grammar or schema of this request takes too long to follow: its ambiguous or widely "
        "branching parts cost more with every token; make it simpler"
    )
