"""A list that tasks can wait on: what was seen so far, and what will be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

MAX_ENTRIES = 500_000
"""Between two calls of `clear`; far more than the busiest cell writes."""


class Journal(Generic[T]):
    """Entries in the order in which they came.

    Attributes:
      entries: since the last `clear`.
    """

    def __init__(self) -> None:
        self.entries: list[T] = []
        self._changed = trio.Event()

    def add(self, entry: T) -> None:
        """Write down, and wake whoever waits."""
        assert len(self.entries) < MAX_ENTRIES, "clear() between cells"
        self.entries.append(entry)
        self._changed.set()
        self._changed = trio.Event()

    def clear(self) -> None:
        """Begin a new page."""
        self.entries.clear()

    async def wait_for(self, wants: Callable[[T], bool]) -> T:
        """Return the first entry that is wanted, once there is one. Bound it by a deadline."""
        looked_at = 0
        while True:
            looked_at = min(looked_at, len(self.entries))
            for entry in self.entries[looked_at:]:
                if wants(entry):
                    return entry
            looked_at = len(self.entries)
            await self._changed.wait()
