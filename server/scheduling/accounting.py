"""Whether every request got exactly one answer: received == accepted + rejected, and accepted ==
ended + in flight.

Counts; knows nothing of how it came to be.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from triolet.errors import LocalProtocolError


class Outcome(StrEnum):
    """Every way in which an accepted request ends."""

    STOP = "stop"
    LENGTH = "length"
    EMBEDDED = "embedded"  # an input has its vector
    CLIENT_GONE = "client_gone"
    STOPPED = "stopped"
    STALLED = "stalled"
    DEADLINE = "deadline"
    EXPIRED = "expired"  # dropped before anything was spent: its first token would be too late
    DRAIN = "drain"
    DISMISSED = "dismissed"  # its tenant was disabled or removed
    NO_WORKER = "no_worker"
    QUARANTINED = "quarantined"  # its prompt killed workers, or its grammar held one up
    REFUSED = "refused"  # longer than the worker that it met takes
    ERROR = "error"


@dataclass(slots=True)
class Accounting:
    """Counters since the server's start.

    Attributes:
      received: submitted.
      accepted: of these, will get a terminal event.
      rejected: of these, were refused at once; by error code.
      ended: terminal events given out; by outcome.
    """

    received: int = 0
    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    ended: Counter[Outcome] = field(default_factory=Counter)

    def check(self, in_flight: int) -> None:
        """Raise unless the sums are right.

        Raises:
          LocalProtocolError: a request was lost or answered twice.
        """
        if self.received != self.accepted + self.rejected.total():
            raise LocalProtocolError(f"requests do not add up: {self}")
        if self.accepted != self.ended.total() + in_flight:
            raise LocalProtocolError(f"terminal events do not add up, {in_flight} run: {self}")
