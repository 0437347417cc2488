"""The order of steps in a rolling restart. No I/O; restart.py executes the steps.

Processes restart one at a time. If a role has a single worker, a spare runs while it restarts.
Workers restart before servers: an old server needs workers until its last stream has ended, and its
successor only meets new workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from triolet.ids import Role

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from .process_spec import ProcessSpec


class RollingMove(Enum):
    """A kind of step."""

    START_SPARE = "starting a spare"
    RESTART = "draining, then restarting"
    START = "starting without waiting for the retry delay"
    REPLACE = "starting a successor, then draining the old process"
    RETIRE_SPARE = "draining the spare"


@dataclass(frozen=True, slots=True)
class RollingStep:
    """One step of a restart.

    Attributes:
      move: kind of step.
      name: name of the process.
    """

    move: RollingMove
    name: str

    def __str__(self) -> str:
        return f"{self.name}: {self.move.value}"


ORDER = (Role.PREFILL, Role.DECODE, Role.CONTROL, Role.SERVER)
_ALONE = (Role.CONTROL, Role.SERVER)
"""Roles that do not belong to a model."""


def restart_steps(
    specs: Sequence[ProcessSpec],
    spares: Mapping[tuple[str, Role], ProcessSpec],
    roles: Collection[Role],
) -> list[RollingStep]:
    """Return the steps in order: model by model, then control, then the servers.

    Args:
      specs: running processes.
      spares: spares by model and role.
      roles: roles to restart.
    """
    steps: list[RollingStep] = []
    models = dict.fromkeys(spec.model for spec in specs if spec.role not in _ALONE)
    for model, role in ((model, role) for model in models for role in ORDER):
        if role not in roles or role in _ALONE:
            continue
        own = [spec.name for spec in specs if (spec.model, spec.role) == (model, role)]
        spare = spares.get((model, role)) if len(own) == 1 else None
        if spare is not None:
            steps.append(RollingStep(RollingMove.START_SPARE, spare.name))
        steps += [RollingStep(RollingMove.RESTART, name) for name in own]
        if spare is not None:
            steps.append(RollingStep(RollingMove.RETIRE_SPARE, spare.name))
    if Role.CONTROL in roles:
        steps += [
            RollingStep(RollingMove.RESTART, spec.name)
            for spec in specs
            if spec.role is Role.CONTROL
        ]
    if Role.SERVER in roles:
        steps += [
            RollingStep(RollingMove.REPLACE, spec.name)
            for spec in specs
            if spec.role is Role.SERVER
        ]
    return steps
