"""A rolling restart: takes the steps of rolling.py with the slots of the groups that run."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from triolet.ids import Role

from .rolling import RollingMove, RollingStep, restart_steps
from .slot import RestartFailed, see_out

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from triolet.config import SupervisorConfig

    from .group import Group
    from .process_spec import ProcessSpec
    from .slot import Slot


_WORKERS: Final = (Role.PREFILL, Role.DECODE)


class RestartLimits(NamedTuple):
    """How long a restart waits.

    Attributes:
      server_exit_s: for a server to drain and leave.
      worker_exit_s: for a worker to finish its sequences and leave.
      config: for a new worker to be used.
      start_s: for a new worker to become ready, the first end of which is a failure then; None for
        as long as it takes, and as often as it is started again.
    """

    server_exit_s: float
    worker_exit_s: float
    config: SupervisorConfig
    start_s: float | None = None


async def take_steps(
    groups: Sequence[Group],
    roles: Collection[Role],
    is_met: Callable[[str], Awaitable[bool]],
    tell: Callable[[RollingStep], Awaitable[None]],
    limits: RestartLimits,
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
                case RollingMove.START_SPARE:
                    await _within(limits.start_s, step.name, slot.start_one)
                    await _meet(step.name, is_met, limits.config)
                case RollingMove.RESTART:
                    await _restart(slot, limits)
                    if slot.spec.role is not Role.CONTROL:
                        await _meet(step.name, is_met, limits.config)
                case RollingMove.REPLACE:
                    await slot.replace(limits.server_exit_s)
                case RollingMove.RETIRE_SPARE:
                    await see_out(tuple(slot.lives), limits.worker_exit_s)
    except RestartFailed:
        for spec in spares.values():
            await see_out(tuple(slots[spec.name].lives), limits.worker_exit_s)
        raise


async def change_specs(
    group: Group,
    specs: Mapping[str, ProcessSpec],
    is_met: Callable[[str], Awaitable[bool]],
    tell: Callable[[RollingStep], Awaitable[None]],
    limits: RestartLimits,
) -> None:
    """Restart the workers of a model in turn with other settings; all of them or none.

    Args:
      group: that runs.
      specs: of its workers and stand-ins, by name.
      is_met: as of `take_steps`.
      tell: likewise.
      limits: likewise, with `start_s`.

    Raises:
      RestartFailed: one did not become ready. Each worker has the settings that it had.
    """
    before = {spec.name: spec for spec in (*group.specs, *group.spares.values())}

    async def changed(step: RollingStep) -> None:
        # Not all at once: what dies before its turn is started as it was.
        if step.move is not RollingMove.RETIRE_SPARE and step.name in specs:
            group.use({step.name: specs[step.name]})
        await tell(step)

    try:
        await take_steps([group], _WORKERS, is_met, changed, limits)
        group.use(specs)
    except RestartFailed:
        group.use(before)
        for spec in group.specs:
            slot = group.slots[spec.name]
            if slot.current is None or slot.current.spec is not spec:
                await tell(RollingStep(RollingMove.RESTART, spec.name))
                await slot.restart(limits.worker_exit_s)
        raise


async def _restart(slot: Slot, limits: RestartLimits) -> None:
    if limits.start_s is None:
        await slot.restart(limits.worker_exit_s)
        return
    restart = partial(slot.restart, limits.worker_exit_s, is_doubtful=True)
    await _within(limits.worker_exit_s + limits.start_s, slot.spec.name, restart)


async def _within(seconds: float | None, name: str, start: Callable[[], Awaitable[object]]) -> None:
    """Start a worker within a time.

    Raises:
      RestartFailed: it is not ready then, or has failed.
    """
    with trio.move_on_after(math.inf if seconds is None else seconds):
        await start()
        return
    raise RestartFailed(
        f"{name} was not ready after {seconds:g} s (supervisor.adapter_start_s, and where another "
        "one drained before it worker.drain_timeout_s); its log lines say why"
    )


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
