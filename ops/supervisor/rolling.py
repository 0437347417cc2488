"""The order in which the processes of a fleet are restarted while it serves. Pure.

One process at a time, so that at most one of a role is away. A role with one worker only would then
have none: a spare worker fills its place meanwhile. Workers go first: the old server, which needs
them until its last stream has ended, goes last, and its successor meets new workers only.
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
    """What is done to a process."""

    START_SPARE = "starting, to stand in"
    RESTART = "draining, then starting afresh"
    START = "starting afresh, before its pause is over"
    REPLACE = "starting a successor, then draining the old one"
    RETIRE_SPARE = "draining, its work is done"


@dataclass(frozen=True, slots=True)
class RollingStep:
    """One step of a restart.

    Attributes:
      move: what is done.
      name: to which process.
    """

    move: RollingMove
    name: str

    def __str__(self) -> str:
        return f"{self.name}: {self.move.value}"


ORDER = (Role.PREFILL, Role.DECODE, Role.CONTROL, Role.SERVER)
_ALONE = (Role.CONTROL, Role.SERVER)
"""Roles of no model."""


def restart_steps(
    specs: Sequence[ProcessSpec],
    spares: Mapping[tuple[str, Role], ProcessSpec],
    roles: Collection[Role],
) -> list[RollingStep]:
    """Return what to do, in order: model by model, then control, then the servers.

    Args:
      specs: what runs.
      spares: what may stand in, by model and role.
      roles: which processes to restart.
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
