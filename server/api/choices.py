"""Waiting on the generations behind one answer. Knows trio and generations; no form of answer.

Nothing is held between two calls, so whoever reads may be dropped at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ..generation import Delta
from .listening import listen_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..generation import Event, Generation


class Choices:
    """Several generations, numbered as the answer numbers them.

    Args:
      generations: one per choice.
    """

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._open = dict(enumerate(generations))

    @property
    def are_over(self) -> bool:
        """Whether every choice has had its last event."""
        return not self._open

    def take_now(self) -> list[tuple[int, Sequence[Event]]]:
        """Return (index, events) of every choice that has events, without waiting."""
        taken = []
        for index, generation in tuple(self._open.items()):
            events = generation.take_now()
            if events:
                taken.append((index, events))
                if not isinstance(events[-1], Delta):
                    del self._open[index]
                    generation.listen(None)  # or it would hold its listener, and that one this
        return taken

    def listen(self, on_events: Callable[[], None] | None) -> None:
        """Have this called whenever any choice has events (see Generation.listen); None to stop."""
        for generation in self._open.values():
            generation.listen(on_events)

    async def next_events(self) -> Sequence[tuple[int, Sequence[Event]]]:
        """Wait until any choice has events; return those of all that have."""
        if taken := self.take_now():
            await trio.lowlevel.checkpoint()
            return taken
        await listen_until(self.listen, lambda: True)
        return self.take_now()
