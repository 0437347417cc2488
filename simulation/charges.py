"""What a server says that its clients used: held against what it took on, and what they got.

Subscribes to request events (server/contract/request_events.py) as accounts do, without money.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from server.contract.request_events import AnswerRepeated, RequestAccepted, RequestEnded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from server.contract.generation import Usage
    from server.contract.request_events import RequestEvents


class Charge(NamedTuple):
    """What one sequence or input is charged for."""

    usage: Usage
    is_begun: bool


class RecordingCharges:
    """Writes down what requests used.

    Args:
      report: told of everything that must not happen, in words.

    Attributes:
      of: what each was charged for, by id.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.of: dict[bytes, Charge] = {}
        self._open: set[bytes] = set()
        self._report = report

    def subscribe_to(self, events: RequestEvents) -> None:
        """Write down from now on."""
        events.subscribe(RequestAccepted, self._expect)
        events.subscribe(AnswerRepeated, self._object)
        events.subscribe(RequestEnded, self._take)

    def _expect(self, event: RequestAccepted) -> None:
        request_id = event.facts.request_id
        if request_id in self._open or request_id in self.of:
            self._report(f"{request_id.hex()} was taken on twice")
        self._open.add(request_id)

    def _object(self, event: AnswerRepeated) -> None:
        self._report(f"{event.request_id.hex()} was answered from memory, and none is kept here")

    def _take(self, event: RequestEnded) -> None:
        request_id, usage = event.facts.request_id, event.usage
        if request_id not in self._open:
            self._report(f"{request_id.hex()} was charged twice, or never taken on")
        if usage.completion_tokens and not event.is_begun:
            self._report(f"{request_id.hex()} has tokens that are not charged")
        self._open.discard(request_id)
        self.of[request_id] = Charge(usage, event.is_begun)

    def check(self, running: Iterable[bytes]) -> None:
        """Report whatever ended without being charged, or was charged and runs."""
        for request_id in self._open ^ set(running):
            self._report(f"{request_id.hex()} runs and is charged already, or the other way round")
