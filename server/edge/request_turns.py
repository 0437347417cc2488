"""A bound on the requests that begin in one turn of the event loop.

What a small request costs at once (its head, its route, the JSON of its body, its refusal) is up to
some milliseconds, and the loop runs everything that is ready before it looks at the next event:
without a bound a turn takes as long as all requests that have arrived. With it they wait for the
next turns, in the order in which they came. Probes of liveness do not wait.
"""

from __future__ import annotations

from typing import Final

import trio

PROBES: Final = (b"GET /health/live ", b"GET /ping ")
"""What an orchestrator asks; it ends a process that answers too late."""


class RequestTurns:
    """Lets requests begin, so many in a turn.

    Args:
      per_turn: requests that begin in one turn at most.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = self._left = per_turn
        self._waiting = trio.lowlevel.ParkingLot()
        self._is_counting = False

    async def wait(self) -> None:
        """Return when a request may go on: at once, or in a later turn."""
        if self._left and not self._waiting:
            self._left -= 1
            self._count_turn()
        else:
            self._count_turn()
            await self._waiting.park()

    def _count_turn(self) -> None:
        """Have a new turn noticed; its callbacks run once in each."""
        if not self._is_counting:
            self._is_counting = True
            trio.lowlevel.current_trio_token().run_sync_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_counting = False
        woken = self._waiting.unpark(count=self._per_turn)
        self._left = self._per_turn - len(woken)
        if woken:
            self._count_turn()
