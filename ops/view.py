"""What `triolet serve` shows, as its parts see it. The views themselves are files of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from .watcher import Watcher

if TYPE_CHECKING:
    from types import TracebackType


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
