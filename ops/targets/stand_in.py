"""Runs lost processes of a fleet on Ray until Ray has restarted their actors.

Ray needs ten seconds for that on two busy cores, most of them for imports: of Ray by an actor, of
torch by its process. A stand-in forks processes from templates, which have imported before.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from .actors import stood_in_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from triolet.config import RayConfig
    from triolet.ids import Place

    from ..supervisor.starter import Starter
    from .owned_process import OwnedProcess


class StandIn:
    """Runs lost processes of its zone, and of zones whose stand-in is lost too.

    Args:
      place: a place of its zone and model.
      config: zones and limits.
      lost: returns the names of the actors that Ray restarts. It blocks.
      is_over: returns whether an actor's process serves, or the actor has left. It blocks.
      starter: starts the processes.
      make: returns a process for the actor of this name.
    """

    def __init__(
        self,
        place: Place,
        config: RayConfig,
        lost: Callable[[], set[str]],
        is_over: Callable[[str], bool],
        starter: Starter,
        make: Callable[[str], OwnedProcess],
    ) -> None:
        self._place, self._config = place, config
        self._lost, self._is_over = lost, is_over
        self._starter, self._make = starter, make
        self._running: dict[str, OwnedProcess] = {}

    async def run(self, leaving: trio.Event) -> None:
        """Stand in for lost actors, until asked to leave; then let the processes drain."""
        async with trio.open_nursery() as processes, trio.open_nursery() as watching:
            watching.start_soon(self._watch, processes)
            await leaving.wait()
            watching.cancel_scope.cancel()
            for process in self._running.values():
                process.leaving.set()

    async def _watch(self, processes: trio.Nursery) -> None:
        in_thread = partial(trio.to_thread.run_sync, abandon_on_cancel=True)
        # Another one stands in for what was lost before this one began.
        others = await in_thread(self._lost)
        while True:
            await self._starter.reap_ended()
            lost = await in_thread(self._lost)
            others &= lost
            for name in stood_in_for(lost - others, self._place, self._config):
                if name not in self._running and len(self._running) < self._config.max_stand_ins:
                    self._running[name] = self._make(name)
                    processes.start_soon(self._running[name].run)
            for name in self._running.keys() - lost:
                if await in_thread(self._is_over, name):
                    self._running.pop(name).leaving.set()
            await trio.sleep(self._config.watch_s)
