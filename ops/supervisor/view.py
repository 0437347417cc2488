"""Interfaces for output about a fleet: a Watcher receives events of processes, a View shows
them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from types import TracebackType

    from triolet.status import Report

    from .restart_policy import Ending, GiveUp, Verdict


class Watcher(Protocol):
    """Called from the supervisor's tasks; must not block."""

    def started(self, name: str, pid: int) -> None: ...

    def reported(self, name: str, report: Report) -> None: ...

    def ended(self, name: str, ending: Ending, verdict: Verdict | None) -> None:
        """A process ended. The verdict is None if it was asked to exit."""
        ...

    def failed(self, model: str, reason: GiveUp) -> None:
        """A worker of a model cannot be kept alive; other models keep running."""
        ...

    def stopping(self) -> None: ...


class View(Watcher, Protocol):
    """A Watcher that is open while the fleet runs, and announces when it accepts requests."""

    def __enter__(self) -> View: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def serving(self, url: str) -> None:
        """Announce that the fleet accepts requests at this base address."""
        ...

    async def run(self) -> None:
        """Show output that is due at a certain time, until cancelled."""
        ...
