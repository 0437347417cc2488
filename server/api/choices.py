"""Waiting on the generations behind one answer. Knows trio and generations; no form of answer.

Nothing is held between two calls: the tasks that wait on several generations at once live within
one call, so whoever reads may be dropped at any time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from ..generation import Failed, Finished

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..generation import Event, Generation


class Choices:
    """Several generations, numbered as the answer numbers them.

    Args:
      generations: one per choice.
    """

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._open = dict(enumerate(generations))
        self._taken: list[tuple[int, Sequence[Event]]] = []

    @property
    def are_over(self) -> bool:
        """Whether every choice has had its last event."""
        return not self._open

    async def next_events(
        self, deadline: float = math.inf
    ) -> Sequence[tuple[int, Sequence[Event]]]:
        """Wait until any choice has events; return those of all that have.

        Args:
          deadline: on trio's clock.

        Returns:
          (index, events) pairs; none if nothing came by the deadline.
        """
        if len(self._open) == 1:
            ((index, generation),) = self._open.items()
            with trio.move_on_at(deadline):
                await self._take(index, generation)
        else:
            async with trio.open_nursery() as nursery:
                nursery.cancel_scope.deadline = deadline
                for index, generation in self._open.items():
                    nursery.start_soon(self._take_first, index, generation, nursery.cancel_scope)
        taken, self._taken = self._taken, []
        return taken

    async def _take(self, index: int, generation: Generation) -> None:
        events = await generation.next_events()
        self._taken.append((index, events))
        if isinstance(events[-1], Finished | Failed):
            del self._open[index]

    async def _take_first(
        self, index: int, generation: Generation, others: trio.CancelScope
    ) -> None:
        await self._take(index, generation)
        others.cancel()
