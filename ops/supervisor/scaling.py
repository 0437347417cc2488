"""How many workers a model has, changed while the fleet runs: which processes that makes, and the
file that tells the servers.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec

from triolet.config import Pinning
from triolet.errors import ConfigError
from triolet.members import Member, written_members

from ..running_fleets import write_note
from .plan import control_address
from .slot import RestartFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from triolet.ids import Role

    from ..running_fleets import Note
    from .plan import FleetPlan
    from .process_spec import ProcessSpec

MEMBERS: Final = "members.json"
"""In the private directory of the fleet."""


class Scaling:
    """The plan of a fleet that grows and shrinks.

    Args:
      plan: as the fleet was started.
      note: what commands read of it.
      directory: of the fleet.
      specs: returns the processes of a plan.
    """

    def __init__(
        self,
        plan: FleetPlan,
        note: Note,
        directory: Path,
        specs: Callable[[FleetPlan], Sequence[ProcessSpec]],
    ) -> None:
        self._plan = plan
        self._note = note
        self._directory = directory
        self._specs = specs
        self._spares = plan.spares
        # Also those of a plan that was refused, or is not reached yet: which of them are there,
        # `_present` says.
        self._workers = {worker.name: worker for worker in plan.workers}
        self._present = {
            place: {worker.name for worker in plan.workers if worker.model == place}
            for place in range(len(plan.models))
        }

    def plan(self, model: str, role: Role, count: int) -> list[ProcessSpec]:
        """Plan another number of workers; return all of them.

        Args:
          model: name of it, empty for the only one where that has none.
          role: of the workers.
          count: how many there shall be.

        Raises:
          ConfigError: there is no such model, or there cannot be so many.
        """
        if self._plan.settings.fleet.pin is not Pinning.OFF:
            raise ConfigError(
                "fleet.pin gave each worker cores of its own at the start; start the fleet with "
                f"fleet.{role.value}={count}, or with fleet.pin=off"
            )
        place = self._place(model)
        plan = self._plan.with_count(place, role, count)
        own = [one for one in plan.workers if (one.model, one.role) == (place, role)]
        names = {one.name for one in own}
        specs = [spec for spec in self._specs(plan) if spec.name in names]
        self._plan = plan
        self._workers.update((worker.name, worker) for worker in plan.workers)
        return specs

    def note(self, model: str, names: Sequence[str]) -> None:
        """Tell servers and commands which workers a model has now.

        Raises:
          RestartFailed: a file cannot be written.
        """
        self._present[self._place(model)] = set(names)
        workers = [
            worker
            for worker in self._workers.values()
            if worker.name in self._present[worker.model]
        ]
        addresses = {one.name: control_address(self._directory, one) for one in workers}
        members = tuple(
            Member(
                one.role,
                control_address(self._directory, one),
                self._plan.models[one.model].name,
            )
            for one in (*workers, *self._spares)
        )
        new = self._directory / f"{MEMBERS}.new"
        try:
            new.write_bytes(written_members(members))
            os.replace(new, self._directory / MEMBERS)
            write_note(self._directory, msgspec.structs.replace(self._note, workers=addresses))
        except OSError as error:
            raise RestartFailed(
                f"cannot write which workers {model or 'the fleet'} has: {error}; make room in "
                f"{self._directory}, and ask again"
            ) from error

    def _place(self, model: str) -> int:
        names = [one.name for one in self._plan.models]
        if model not in names:
            known = ", ".join(f"{name}.decode" for name in names) if names[0] else "decode"
            raise ConfigError(f"no model is called {model!r}; say for example {known}")
        return names.index(model)
