"""What is told of a fleet's processes, and to what."""

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
        """A process ended; the verdict is None if that was asked for."""
        ...

    def failed(self, model: str, reason: GiveUp) -> None:
        """A model's worker cannot be kept alive; other models go on."""
        ...

    def stopping(self) -> None: ...


class View(Watcher, Protocol):
    """A Watcher that is open while the fleet runs and also shows that requests are taken."""

    def __enter__(self) -> View: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def serving(self, url: str) -> None:
        """Show that requests are taken at this base address."""
        ...

    async def run(self) -> None:
        """Show what time alone brings about, until cancelled."""
        ...
