"""Compare the usage that a server charges with what it accepted and what clients received.

Subscribes to request events (server/contract/request_events.py) like the accounting, without
prices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from server.contract.request_events import AnswerRepeated, RequestAccepted, RequestEnded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from server.contract.generation import Usage
    from server.contract.request_events import RequestEvents


class Charge(NamedTuple):
    """Usage charged for one sequence or input."""

    usage: Usage
    is_begun: bool


class RecordingCharges:
    """Records the usage of requests.

    Args:
      report: called with a description of each violation.

    Attributes:
      of: charge by request id.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.of: dict[bytes, Charge] = {}
        self._open: set[bytes] = set()
        self._report = report

    def subscribe_to(self, events: RequestEvents) -> None:
        """Start recording."""
        events.subscribe(RequestAccepted, self._expect)
        events.subscribe(AnswerRepeated, self._object)
        events.subscribe(RequestEnded, self._take)

    def _expect(self, event: RequestAccepted) -> None:
        request_id = event.facts.request_id
        if request_id in self._open or request_id in self.of:
            self._report(f"{request_id.hex()} was accepted twice")
        self._open.add(request_id)

    def _object(self, event: AnswerRepeated) -> None:
        self._report(
            f"{event.request_id.hex()} was answered from the response cache, which is off here"
        )

    def _take(self, event: RequestEnded) -> None:
        request_id, usage = event.facts.request_id, event.usage
        if request_id not in self._open:
            self._report(f"{request_id.hex()} was charged twice, or never accepted")
        if usage.completion_tokens and not event.is_begun:
            self._report(f"{request_id.hex()} has tokens that were not charged")
        self._open.discard(request_id)
        self.of[request_id] = Charge(usage, event.is_begun)

    def check(self, running: Iterable[bytes]) -> None:
        """Report requests that ended without a charge, or were charged before their end."""
        for request_id in self._open ^ set(running):
            self._report(f"{request_id.hex()} is charged while running, or ended without a charge")
