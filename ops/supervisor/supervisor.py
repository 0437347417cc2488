"""The supervisor of a fleet on one machine: restarts dead processes, does rolling restarts on
command, and ends all in order: servers first, so that their streams finish, then the workers.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import trio

from triolet.ids import Role

from .rolling import Move, restart_steps
from .slot import RestartFailed, Slot
from .starter import Starter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from triolet.config import SupervisorConfig

    from .process_spec import ProcessSpec
    from .restart_policy import GiveUp
    from .rolling import Step
    from .view import Watcher

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the polite request, and a terminal that was closed: all mean a clean shutdown."""


class Supervisor:
    """A fleet of processes.

    Args:
      specs: what to run; names are unique.
      config: delays and deadlines.
      server_exit_s: how long a server may take to drain and leave.
      watcher: who is told.
      on_log: called with a process's name and each line on its stderr; None lets those lines go to
        the supervisor's own stderr.
      spares: what stands in for the only process of its role while that is restarted; at most one
        of a role.
      worker_drain_s: how long a worker that is restarted may let its sequences finish.
      starter: starts the processes; None spawns each.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        config: SupervisorConfig,
        server_exit_s: float,
        watcher: Watcher,
        on_log: Callable[[str, bytes], None] | None = None,
        *,
        spares: Sequence[ProcessSpec] = (),
        worker_drain_s: float = 0.0,
        starter: Starter | None = None,
    ) -> None:
        self._specs = specs
        self._spares = {spec.role: spec for spec in spares}
        self._config = config
        self._server_exit_s = server_exit_s
        self._worker_drain_s = worker_drain_s
        self._starter = starter or Starter()
        self._watcher = watcher
        self._on_log = on_log
        self._slots: dict[str, Slot] = {}
        self._begun = trio.Event()
        self._stop = trio.Event()
        self._failure: GiveUp | None = None
        self._is_restarting = False

    async def run(self) -> GiveUp | None:
        """Run the fleet until `stop` has been called and every process is gone.

        Returns:
          Why it had to end, if not because that was asked for.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_in_order)
            for spec in (*self._specs, *self._spares.values()):
                self._slots[spec.name] = Slot(
                    spec,
                    self._starter,
                    self._config,
                    self._watcher,
                    self._on_log,
                    self._stop,
                    nursery,
                )
            for spec in self._specs:
                nursery.start_soon(self._keep, self._slots[spec.name])
            self._begun.set()
        return self._failure

    async def wait_all_ready(self) -> None:
        """Wait until every process is ready."""
        await self._begun.wait()
        for spec in self._specs:
            await self._slots[spec.name].wait_ready()

    async def wait_stopping(self) -> None:
        """Wait until the shutdown has begun, for whatever reason."""
        await self._stop.wait()

    def stop(self) -> None:
        """Begin the shutdown in order; called again, kill what still runs."""
        if self._stop.is_set():
            for slot in self._slots.values():
                for life in slot.lives:
                    life.child.signal(signal.SIGKILL)
            return
        self._watcher.stopping()
        self._stop.set()
        for slot in self._slots.values():
            slot.abandon_starts()

    def fail(self, reason: GiveUp) -> None:
        """Begin the shutdown because of this; the first reason is the one that counts."""
        if self._failure is None and not self._stop.is_set():
            self._failure = reason
            self.stop()

    async def restart(
        self,
        roles: Collection[Role],
        is_met: Callable[[str], Awaitable[bool]],
        tell: Callable[[Step], Awaitable[None]],
    ) -> None:
        """Restart every process of some roles in turn while the others serve.

        Args:
          roles: which.
          is_met: whether a server sees the worker of this name alive, asked once it is ready.
          tell: called before each step.

        Raises:
          RestartFailed: another restart is under way, the fleet ends, or a new process did not
            become ready. What was not restarted yet runs on.
        """
        if self._is_restarting:
            raise RestartFailed("a restart is under way already; wait for its end")
        self._is_restarting = True
        failure: RestartFailed | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_at_stop, nursery.cancel_scope)
                try:
                    await self._take_steps(roles, is_met, tell)
                except RestartFailed as error:
                    failure = error
                nursery.cancel_scope.cancel()
        finally:
            self._is_restarting = False
        if self._stop.is_set():
            raise RestartFailed("the fleet was stopped meanwhile")
        if failure is not None:
            raise failure

    async def _take_steps(
        self,
        roles: Collection[Role],
        is_met: Callable[[str], Awaitable[bool]],
        tell: Callable[[Step], Awaitable[None]],
    ) -> None:
        worker_exit_s = self._worker_drain_s + self._config.worker_exit_s
        try:
            self._starter.renew()
        except OSError as error:
            raise RestartFailed(f"cannot start a template of new processes: {error}") from error
        try:
            for step in restart_steps(self._specs, self._spares, roles):
                await tell(step)
                slot = self._slots[step.name]
                match step.move:
                    case Move.START_SPARE:
                        await slot.start_one()
                        await self._meet(step.name, is_met)
                    case Move.RESTART:
                        await slot.restart(worker_exit_s)
                        await self._meet(step.name, is_met)
                    case Move.REPLACE:
                        await slot.replace(self._server_exit_s)
                    case Move.RETIRE_SPARE:
                        await slot.retire(worker_exit_s)
        except RestartFailed:
            for spec in self._spares.values():
                await self._slots[spec.name].retire(worker_exit_s)
            raise

    async def _meet(self, name: str, is_met: Callable[[str], Awaitable[bool]]) -> None:
        """Wait until a worker is given work: only then may the next one leave."""
        with trio.move_on_after(self._config.ready_timeout_s):
            while not await is_met(name):  # noqa: ASYNC110 (another process knows)
                await trio.sleep(self._config.ready_poll_s)
            return
        raise RestartFailed(
            f"{name} is up, but after {self._config.ready_timeout_s:.0f} s no server uses it: see "
            "the server's log lines, or its model is not that of the others"
        )

    async def _cancel_at_stop(self, scope: trio.CancelScope) -> None:
        await self._stop.wait()
        scope.cancel()

    async def _keep(self, slot: Slot) -> None:
        reason = await slot.keep()
        if reason is not None:
            self.fail(reason)

    async def _end_in_order(self) -> None:
        await self._stop.wait()
        # While the server drains, its streams still need the workers.
        for roles, grace_s in (
            ((Role.SERVER,), self._server_exit_s),
            ((Role.PREFILL, Role.DECODE), self._config.worker_exit_s),
        ):
            lives = [
                life
                for slot in self._slots.values()
                if slot.spec.role in roles
                for life in slot.lives
            ]
            for life in lives:
                # One that leaves already would take a second request for "at once".
                if not life.is_leaving:
                    life.ask_to_leave(signal.SIGTERM)
            with trio.move_on_after(grace_s):
                for life in lives:
                    await life.over.wait()
            for life in lives:
                life.child.signal(signal.SIGKILL)


async def stop_on_signals(
    supervisor: Supervisor, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Turn signals into `stop`, for as long as it runs; a second signal kills at once."""
    with trio.open_signal_receiver(*END_SIGNALS) as signals:
        task_status.started()
        async for _ in signals:
            supervisor.stop()
