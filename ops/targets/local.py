"""`LocalTarget`: a `triolet serve` on this machine. Its supervisor starts and drains workers."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from triolet.errors import ConfigError
from triolet.ids import Place, Role

from ..supervisor.supervisor_socket import ScaleRequest, ask, ask_models
from .target import Observed

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..running_fleets import RunningFleet
    from ..supervisor.model_status import RunningWorker


class LocalTarget:
    """One running fleet. See `Target`.

    Args:
      fleet: the fleet.
    """

    def __init__(self, fleet: RunningFleet) -> None:
        self._socket = fleet.supervisor_socket

    def check(self, place: Place) -> None:
        """See `Target`."""
        if place.zone:
            raise ConfigError(
                f"--zone is {place.zone!r}, but the workers of `triolet serve` are in one place; "
                "leave it out"
            )
        if place.role is Role.SERVER:
            raise ConfigError(
                "the number of servers of `triolet serve` is set at its start (--servers)"
            )

    async def scale(self, place: Place, count: int, tell: Callable[[str], object]) -> None:
        """See `Target`."""
        await ask(self._socket, ScaleRequest(place.model, place.role, count), tell)

    async def observe(self) -> dict[Place, Observed]:
        """See `Target`."""
        found: dict[Place, list[RunningWorker]] = defaultdict(list)
        failures: dict[str, str] = {}
        for model in (await ask_models(self._socket)).models:
            failures[model.name] = model.failure or ""
            for worker in model.workers:
                found[Place(model.name, worker.role)].append(worker)
        return {
            place: Observed(
                len(workers),
                sum(worker.is_ready for worker in workers),
                tuple(
                    failures[place.model] or f"{worker.name}: it starts"
                    for worker in workers
                    if not worker.is_ready
                ),
            )
            for place, workers in found.items()
        }
