"""Who is told what happens to the processes of a fleet. Knows only what is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from triolet.status import Report

    from .restart_policy import Ending, Verdict


class Watcher(Protocol):
    """Called from the supervisor's tasks; must not block."""

    def started(self, name: str, pid: int) -> None: ...

    def reported(self, name: str, report: Report) -> None: ...

    def ended(self, name: str, ending: Ending, verdict: Verdict | None) -> None:
        """A process ended; the verdict is None if that was asked for."""
        ...

    def stopping(self) -> None: ...
