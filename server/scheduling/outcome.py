"""How a request ends from outside, and what everybody is told: client, workers, accounts.

A table of words; decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from transport.frames import EndReason
from triolet.errors import RequestError, deadline_exceeded, draining, invalid_request, no_worker

from ..contract.generation import CancelReason
from .accounting import Outcome

if TYPE_CHECKING:
    from triolet.config import ServerConfig


class End(NamedTuple):
    """One bad end.

    Attributes:
      error: for the client.
      outcome: for the accounts.
      reason: for the workers.
    """

    error: RequestError
    outcome: Outcome
    reason: EndReason


CANCELLED_STATUS: Final = 499
"""What proxies log for a client that closed first; no client ever sees it."""


def cancelled(reason: CancelReason, config: ServerConfig) -> End:
    """Return the end that somebody asked for."""
    match reason:
        case CancelReason.CLIENT_GONE | CancelReason.WENT_AWAY:
            return End(_cancelled("the client left"), Outcome.CLIENT_GONE, EndReason.CANCEL)
        case CancelReason.STOPPED:
            return End(_cancelled("the client stopped it"), Outcome.STOPPED, EndReason.CANCEL)
        case CancelReason.STALLED:
            return stalled(config.stall_timeout_s)
        case CancelReason.DRAIN:
            return drained()


def drained() -> End:
    """Return the end of what still runs when the server has to go."""
    return End(draining(), Outcome.DRAIN, EndReason.DRAIN)


def dismissed() -> End:
    """Return the end of what runs for a tenant that was disabled or removed."""
    error = RequestError(
        "the tenant of this request was disabled or removed while it ran",
        status=403,
        code="permission_denied",
    )
    return End(error, Outcome.DISMISSED, EndReason.CANCEL)


def stalled(stall_timeout_s: float) -> End:
    """Return the end of a stream that nobody reads."""
    error = RequestError(
        f"the client read nothing for {stall_timeout_s:g} s", status=408, code="request_timeout"
    )
    return End(error, Outcome.STALLED, EndReason.STALLED)


def too_late(deadline_s: float) -> End:
    """Return the end at the deadline."""
    error = deadline_exceeded(f"the request did not finish within its {deadline_s:g} s")
    return End(error, Outcome.DEADLINE, EndReason.DEADLINE)


def no_worker_left(role: str) -> End:
    """Return the end of a request that waited for workers in vain."""
    error = no_worker(f"no {role} worker is there to take this request")
    return End(error, Outcome.NO_WORKER, EndReason.ERROR)


def attempts_spent(num_failures: int, cause: str) -> End:
    """Return the end of a request whose every attempt failed."""
    error = no_worker(f"{num_failures} attempts failed, the last one: {cause.replace('_', ' ')}")
    return End(error, Outcome.NO_WORKER, EndReason.ERROR)


def retries_spent(cause: str) -> End:
    """Return the end of a request whose retry this server cannot afford any more."""
    error = no_worker(
        f"this attempt failed ({cause.replace('_', ' ')}), and too many others failed before it"
    )
    return End(error, Outcome.NO_WORKER, EndReason.ERROR)


def quarantined() -> End:
    """Return the end of a request that killed the workers which computed it, and of every other
    with its prompt."""
    error = RequestError(
        "this prompt made the workers that computed it fail; it is not tried again",
        status=500,
        code="quarantined",
    )
    return End(error, Outcome.QUARANTINED, EndReason.ERROR)


def grammar_too_costly() -> End:
    """Return the end of a request with a grammar that takes a worker too long, and of every
    other of its tenant with that grammar."""
    error = invalid_request(
        "the grammar or schema of this request takes too long to follow: its ambiguous or widely "
        "branching parts cost more with every token; make it simpler",
        code="grammar_too_costly",
    )
    return End(error, Outcome.QUARANTINED, EndReason.TOO_COSTLY)


def other_model() -> End:
    """Return the end of a sequence that no worker can continue exactly."""
    error = no_worker("the model was replaced while this request ran; send it again")
    return End(error, Outcome.NO_WORKER, EndReason.ERROR)


def _cancelled(message: str) -> RequestError:
    return RequestError(message, status=CANCELLED_STATUS, code="cancelled")
