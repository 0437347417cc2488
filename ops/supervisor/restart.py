"""Executes a rolling restart: carries out the steps of rolling.py on the running processes."""

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
    """Timeouts of a restart.

    Attributes:
      server_exit_s: for a server to drain and exit.
      worker_exit_s: for a worker to finish its sequences and exit.
      config: has the timeout for servers to use a new worker.
      start_s: for a new worker to become ready; if it ends before, the restart fails. None waits
        without limit, also over further starts.
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
    """Restart the processes of some roles one at a time.

    Args:
      groups: running groups.
      roles: roles to restart.
      is_met: returns whether every server uses a worker; polled once the worker is ready.
      tell: called before each step.
      limits: timeouts.

    Raises:
      RestartFailed: a new process did not become ready. The remaining ones keep running.
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
    """Restart the workers of a model one at a time with other settings; roll back on failure.

    Args:
      group: running group.
      specs: new settings of its workers and spares by name.
      is_met: see `take_steps`.
      tell: called before each step.
      limits: timeouts, including `start_s`.

    Raises:
      RestartFailed: a worker did not become ready. All workers have their old settings.
    """
    before = {spec.name: spec for spec in (*group.specs, *group.spares.values())}

    async def changed(step: RollingStep) -> None:
        # Apply settings one at a time: a worker that dies before its turn restarts unchanged.
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
    """Start a worker with a timeout.

    Raises:
      RestartFailed: it was not ready in time, or failed.
    """
    with trio.move_on_after(math.inf if seconds is None else seconds):
        await start()
        return
    raise RestartFailed(
        f"{name} was not ready after {seconds:g} s (supervisor.adapter_start_s, plus "
        "worker.drain_timeout_s if an old worker had to drain first); its log lines say why"
    )


async def _meet(
    name: str, is_met: Callable[[str], Awaitable[bool]], config: SupervisorConfig
) -> None:
    """Wait until servers use a worker; only then may the next one exit."""
    with trio.move_on_after(config.ready_timeout_s):
        while not await is_met(name):  # noqa: ASYNC110 (another process knows)
            await trio.sleep(config.ready_poll_s)
        return
    raise RestartFailed(
        f"{name} is ready, but no server uses it after {config.ready_timeout_s:.0f} s; check the "
        "server's log lines, and that its model is that of the other workers"
    )
