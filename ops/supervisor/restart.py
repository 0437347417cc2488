"""A rolling restart: takes the steps of rolling.py with the slots of the groups that run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import trio

from triolet.ids import Role

from .rolling import Move, restart_steps
from .slot import RestartFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from triolet.config import SupervisorConfig

    from .group import Group
    from .rolling import Step


class Limits(NamedTuple):
    """How long a restart waits.

    Attributes:
      server_exit_s: for a server to drain and leave.
      worker_exit_s: for a worker to finish its sequences and leave.
      config: for a new worker to be used.
    """

    server_exit_s: float
    worker_exit_s: float
    config: SupervisorConfig


async def take_steps(
    groups: Sequence[Group],
    roles: Collection[Role],
    is_met: Callable[[str], Awaitable[bool]],
    tell: Callable[[Step], Awaitable[None]],
    limits: Limits,
) -> None:
    """Restart the processes of some roles in turn.

    Args:
      groups: that run.
      roles: which processes.
      is_met: whether a server sees the worker of this name alive, asked once it is ready.
      tell: called before each step.
      limits: of the waits.

    Raises:
      RestartFailed: a new process did not become ready. What was not restarted yet runs on.
    """
    specs = [spec for group in groups for spec in group.specs]
    spares = {(one.model, role): one for group in groups for role, one in group.spares.items()}
    slots = {name: slot for group in groups for name, slot in group.slots.items()}
    try:
        for step in restart_steps(specs, spares, roles):
            await tell(step)
            slot = slots[step.name]
            match step.move:
                case Move.START_SPARE:
                    await slot.start_one()
                    await _meet(step.name, is_met, limits.config)
                case Move.RESTART:
                    await slot.restart(limits.worker_exit_s)
                    if slot.spec.role is not Role.CONTROL:
                        await _meet(step.name, is_met, limits.config)
                case Move.REPLACE:
                    await slot.replace(limits.server_exit_s)
                case Move.RETIRE_SPARE:
                    await slot.retire(limits.worker_exit_s)
    except RestartFailed:
        for spec in spares.values():
            await slots[spec.name].retire(limits.worker_exit_s)
        raise


async def _meet(
    name: str, is_met: Callable[[str], Awaitable[bool]], config: SupervisorConfig
) -> None:
    """Wait until a worker is given work: only then may the next one leave."""
    with trio.move_on_after(config.ready_timeout_s):
        while not await is_met(name):  # noqa: ASYNC110 (another process knows)
            await trio.sleep(config.ready_poll_s)
        return
    raise RestartFailed(
        f"{name} is up, but after {config.ready_timeout_s:.0f} s no server uses it: see "
        "the server's log lines, or its model is not that of the others"
    )
