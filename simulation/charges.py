"""What a server says that its clients used: held against what it took on, and what they got.

A `Charges` (server/contract/generation.py) without money.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from server.contract.generation import Charges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from server.contract.generation import RequestCost, Usage


class Charge(NamedTuple):
    """What one sequence or input is charged for."""

    usage: Usage
    is_begun: bool


class RecordingCharges(Charges):
    """Writes down what it is told. See `Charges`.

    Args:
      report: told of everything that must not happen, in words.

    Attributes:
      of: what each was charged for, by id.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.of: dict[bytes, Charge] = {}
        self._open: set[bytes] = set()
        self._report = report

    def accepted(self, request_id: bytes) -> None:
        """Expect its end."""
        if request_id in self._open or request_id in self.of:
            self._report(f"{request_id.hex()} was taken on twice")
        self._open.add(request_id)

    def repeated(self, request_id: bytes) -> None:
        """Report it: answers are not kept here."""
        self._report(f"{request_id.hex()} was answered from memory")

    def ended(self, request_id: bytes, usage: Usage, *, is_begun: bool) -> RequestCost | None:
        """Take in its end."""
        if request_id not in self._open:
            self._report(f"{request_id.hex()} was charged twice, or never taken on")
        if usage.completion_tokens and not is_begun:
            self._report(f"{request_id.hex()} has tokens that are not charged")
        self._open.discard(request_id)
        self.of[request_id] = Charge(usage, is_begun)
        return None

    def check(self, running: Iterable[bytes]) -> None:
        """Report whatever ended without being charged, or was charged and runs."""
        for request_id in self._open ^ set(running):
            self._report(f"{request_id.hex()} runs and is charged already, or the other way round")
