"""The supervisor of a fleet on one machine: starts and restarts processes, executes rolling
restarts and scaling, and stops the fleet in order (servers first, so that their streams finish,
then workers).
"""

from __future__ import annotations

import secrets
import signal
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

import trio

from triolet.ids import Role

from ..exit_codes import EXIT_BAD_INPUT
from .group import Group, GroupPhase
from .model_status import RunState
from .plan import CONTROL_NAME
from .restart import RestartLimits, change_specs, take_steps
from .rolling import ORDER, RollingMove, RollingStep
from .slot import RestartFailed, Slot, StartAbandoned, see_out
from .starter import Starter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

    from triolet.config import SupervisorConfig

    from .model_status import ModelStatus
    from .process_spec import ProcessSpec
    from .restart_policy import GiveUp
    from .view import Watcher

RUN_ID_BYTES: Final = 8
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals for a clean shutdown: Ctrl-C, termination, and a closed terminal."""


class Supervisor:
    """A fleet of processes.

    Args:
      specs: processes to run; names are unique.
      config: delays and timeouts.
      server_exit_s: time for a server to drain and exit.
      watcher: is notified of starts, reports and ends.
      on_log: called with a process's name and each line on its stderr; None if processes inherit
        the supervisor's stderr.
      spares: replacements that run while the only process of a role restarts; at most one for each
        model and role.
      stopped: names of models without workers at the start of the fleet.
      worker_drain_s: time for a worker to finish its sequences in a restart.
      starter: starts the processes; None to spawn each.

    Attributes:
      stopping: set when the shutdown begins.
      run_id: id of this run of the fleet.
      restarting: groups that are being restarted or scaled.
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
        stopped: Collection[str] = (),
        worker_drain_s: float = 0.0,
        starter: Starter | None = None,
    ) -> None:
        self.run_id = secrets.token_hex(RUN_ID_BYTES)
        self._config = config
        self._server_exit_s = server_exit_s
        # Longest time from SIGTERM to the exit of a worker.
        self._worker_exit_s = worker_drain_s + config.worker_exit_s
        self._starter = starter or Starter()
        self._watcher = watcher
        self._stopped = stopped

        def new_slot(spec: ProcessSpec, nursery: trio.Nursery) -> Slot:
            return Slot(spec, self._starter, config, watcher, on_log, nursery)

        self._new_slot = new_slot
        servers = [spec for spec in specs if spec.role is Role.SERVER]
        self._servers = Group("", servers, (), self._new_slot)
        control = [spec for spec in specs if spec.role is Role.CONTROL]
        self._control = Group("", control, (), self._new_slot)
        self._models: dict[str, Group] = {}
        workers = [spec for spec in specs if spec.role in (Role.PREFILL, Role.DECODE)]
        for name in dict.fromkeys(spec.model for spec in workers):
            own = [spec for spec in workers if spec.model == name]
            stand_ins = [spec for spec in spares if spec.model == name]
            self._models[name] = Group(name, own, stand_ins, self._new_slot)
        self._nursery: trio.Nursery | None = None
        self._begun = trio.Event()
        self.stopping = trio.Event()
        self._failure: GiveUp | None = None
        self.restarting: tuple[Group, ...] = ()
        self._control_was_ready = False

    async def run(self) -> GiveUp | None:
        """Run the fleet until `stop` is called and every process has ended.

        Returns:
          Why the fleet failed, or None.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._end_in_order)
            for group in self._groups:
                is_asleep = group in self._models.values() and group.name in self._stopped
                if group.specs and not is_asleep:
                    self._launch(group)
            if self._control.specs:
                nursery.start_soon(self._keep_control)
            self._begun.set()
        return self._failure

    @property
    def _groups(self) -> list[Group]:
        return [self._servers, self._control, *self._models.values()]

    def _launch(self, group: Group) -> None:
        assert self._nursery is not None, "run has begun"
        group.begin()
        self._nursery.start_soon(group.run, self._give_up)

    def _give_up(self, group: Group, reason: GiveUp) -> None:
        """Stop a model if its worker cannot be kept alive; the whole fleet if it is the last one.
        Control is restarted later."""
        if group.phase is not GroupPhase.RUNNING:
            return
        group.failure = reason
        is_last = all(one.failure for one in self._models.values())
        is_control = group is self._control
        # Models keep running without control. A fleet with invalid control settings must fail.
        is_bad_input = reason.exit_code == EXIT_BAD_INPUT
        is_needed = is_control and is_bad_input and not self._control_was_ready
        if group is self._servers or is_last or is_needed:
            self.fail(reason)
            return
        assert self._nursery is not None, "run has begun"
        if is_control:
            again = f"control is restarted in {self._config.control_retry_s:g} s"
            reason = replace(reason, message=f"{reason.message}; {again}")
        self._watcher.failed(group.name or CONTROL_NAME, reason)
        group.end()
        self._nursery.start_soon(group.leave, self._worker_exit_s)

    async def _keep_control(self) -> None:
        """Restart control some time after it failed, because no model can wake without it."""
        while True:
            with suppress(StartAbandoned):
                await self._control.wait_ready()
                self._control_was_ready = True
            await self._control.wait_gone()
            with trio.move_on_after(self._config.control_retry_s):
                await self.stopping.wait()
            if self.stopping.is_set():
                return
            if self._control.phase is GroupPhase.STOPPED:  # a restart may have started it
                self._launch(self._control)

    async def _start_control(self, tell: Callable[[RollingStep], Awaitable[None]]) -> None:
        """Start failed control without waiting for the retry delay.

        Raises:
          RestartFailed: it did not become ready.
        """
        await tell(RollingStep(RollingMove.START, CONTROL_NAME))
        await self._control.wait_gone()
        if self._control.phase is GroupPhase.STOPPED and not self.stopping.is_set():
            self._launch(self._control)
        try:
            await self._control.wait_ready()
            self._control_was_ready = True
        except StartAbandoned as error:
            failure = self._control.failure
            why = str(error) if failure is None else failure.message
            raise RestartFailed(
                f"control did not become ready: {why}; the other processes run, and control is "
                f"restarted in {self._config.control_retry_s:g} s"
            ) from error

    async def wait_all_ready(self) -> None:
        """Wait until every started process is ready, except those of failed models."""
        await self._begun.wait()
        for group in running(self._groups):
            try:
                await group.wait_ready()
            except StartAbandoned:
                continue

    def stop(self) -> None:
        """Begin a clean shutdown. Called again, kill all processes."""
        if self.stopping.is_set():
            for life in chain.from_iterable(group.lives() for group in self._groups):
                life.child.signal(signal.SIGKILL)
            return
        self._watcher.stopping()
        self.stopping.set()
        for group in self._groups:
            group.end()

    def fail(self, reason: GiveUp) -> None:
        """Begin a shutdown because of a failure. Only the first reason is kept."""
        if self._failure is None and not self.stopping.is_set():
            self._failure = reason
            self.stop()

    async def restart(
        self,
        roles: Collection[Role],
        is_met: Callable[[str], Awaitable[bool]],
        tell: Callable[[RollingStep], Awaitable[None]],
        models: Sequence[str] = (),
    ) -> None:
        """Restart every process of some roles one at a time. Stopped models are skipped.

        Args:
          roles: roles to restart.
          is_met: returns whether every server uses a worker; polled once the worker is ready.
          tell: called before each step.
          models: restart only the workers of these models; empty for all processes.

        Raises:
          RestartFailed: another restart is running, there is nothing to restart, the fleet is being
            stopped, a model does not exist or does not run, or a new process did not become ready.
            The remaining processes keep running.
        """
        require_no_restart(self)
        among = [self.to_change(name) for name in dict.fromkeys(models)] or running(self._groups)
        for group in among:
            if group.phase is not GroupPhase.RUNNING:
                raise RestartFailed(
                    f"the workers of {group.name} do not run; start them with `triolet model load "
                    f"{group.name}`"
                )
        at_stake = {spec.role for group in among for spec in group.specs} if models else ORDER
        try:
            self._starter.renew(set(roles).intersection(at_stake))
        except OSError as error:
            raise RestartFailed(f"cannot start a template of new processes: {error}") from error
        chosen = tuple(
            group for group in among if not {spec.role for spec in group.specs}.isdisjoint(roles)
        )
        is_all = not models and Role.CONTROL in roles
        paused = is_all and bool(self._control.specs) and self._control not in chosen
        self.restarting = (*chosen, self._control) if paused else chosen
        if not self.restarting:
            raise RestartFailed(f"no {' or '.join(sorted(roles))} process runs")
        limits = RestartLimits(self._server_exit_s, self._worker_exit_s, self._config)

        async def take() -> None:
            await take_steps(chosen, roles, is_met, tell, limits)
            if paused:
                await self._start_control(tell)

        try:
            await _until(self.stopping, take)
        finally:
            self.restarting = ()

    async def start_model(self, name: str, tell: Callable[[str], Awaitable[None]]) -> None:
        """Start the workers of a model and wait until they are ready. Idempotent.

        Args:
          name: name of the model.
          tell: called with a description before each step.

        Raises:
          RestartFailed: the model does not exist, a restart is running, the fleet or the model is
            being stopped, or a worker did not start.
        """
        group = self.to_change(name)
        if group.phase is GroupPhase.STOPPING:
            await tell(f"{name}: waiting for its workers to exit")
            await group.wait_gone()
            group = self.to_change(name)
        if group.phase is GroupPhase.STOPPED:
            self._launch(group)
            for spec in group.specs:
                await tell(f"{spec.name}: starting")
        try:
            await group.wait_ready()
        except StartAbandoned:
            why = f"model {name} was stopped during the start"
            message = why if group.failure is None else group.failure.message
            raise RestartFailed(message) from None

    async def stop_model(self, name: str, tell: Callable[[str], Awaitable[None]]) -> None:
        """Drain the workers of a model and wait until they have exited. Idempotent.

        Args:
          name: name of the model.
          tell: called with a description before each step.

        Raises:
          RestartFailed: the model does not exist, a restart is running, or the fleet is being
            stopped.
        """
        group = self.to_change(name)
        if group.phase is GroupPhase.RUNNING:
            assert self._nursery is not None, "a group runs"
            group.end()
            self._nursery.start_soon(group.leave, self._worker_exit_s)
            for spec in group.specs:
                await tell(f"{spec.name}: draining")
        await group.wait_gone()

    async def change_workers(
        self,
        name: str,
        specs: Mapping[str, ProcessSpec],
        is_met: Callable[[str], Awaitable[bool]],
        tell: Callable[[str], Awaitable[None]],
    ) -> None:
        """Restart the workers of a model with other settings, one at a time. If none runs, the next
        start uses them.

        Args:
          name: name of the model.
          specs: new settings of its workers and spares by name.
          is_met: returns whether every server uses a worker.
          tell: called with a description before each step.

        Raises:
          RestartFailed: the model does not exist, a restart is running, the fleet or the model is
            being stopped, or a worker did not become ready. All workers have their old settings.
        """
        group = self.to_change(name)
        if group.phase is GroupPhase.STOPPING:
            await group.wait_gone()
            group = self.to_change(name)
        require_no_restart(self)
        if group.phase is GroupPhase.STOPPED:
            group.use(specs)
            return
        start_s = self._config.adapter_start_s
        limits = RestartLimits(self._server_exit_s, self._worker_exit_s, self._config, start_s)
        self.restarting = (group,)

        async def told(step: RollingStep) -> None:
            await tell(str(step))

        try:
            await group.wait_begun()
            take = partial(change_specs, group, specs, is_met, told, limits)
            await _until(self.stopping, take)
        finally:
            self.restarting = ()

    def add_model(
        self, name: str, specs: Sequence[ProcessSpec], spares: Sequence[ProcessSpec]
    ) -> None:
        """Add a model. `start_model` starts its workers.

        Args:
          name: name of the model.
          specs: its workers.
          spares: its spares.

        Raises:
          RestartFailed: the name is taken, or the fleet is being stopped.
        """
        if self.stopping.is_set():
            raise RestartFailed("the fleet is being stopped")
        if name in self._models:
            raise RestartFailed(f"a model is already called {name!r}")
        self._models[name] = Group(name, specs, spares, self._new_slot)

    def drop_model(self, name: str) -> None:
        """Remove a stopped model.

        Raises:
          RestartFailed: the model does not exist, has workers or is being restarted, or the fleet
            is being stopped.
        """
        if self.to_change(name).phase is not GroupPhase.STOPPED:
            raise RestartFailed(f"model {name} has workers; stop them first")
        del self._models[name]

    async def scale(
        self,
        model: str,
        role: Role,
        specs: Sequence[ProcessSpec],
        note: Callable[[Sequence[str]], None],
        tell: Callable[[str], Awaitable[None]],
    ) -> None:
        """Start and stop workers of a role, one at a time, until exactly `specs` run.

        Args:
          model: name of the model; empty for a single unnamed model.
          role: role of the workers.
          specs: the wanted workers.
          note: called with the names of the model's workers before one starts and after one exits.
          tell: called with a description before each step.

        Raises:
          RestartFailed: the model does not exist, a restart is running, the fleet or the model is
            being stopped, or a worker did not start. Completed changes stay.
        """
        group = self._models[""] if model == "" and "" in self._models else self.to_change(model)
        if self.stopping.is_set():
            raise RestartFailed("the fleet is being stopped")
        require_no_restart(self)
        present = [spec for spec in group.specs if spec.role is role]
        wanted = {spec.name for spec in specs}
        known = {spec.name for spec in present}
        self.restarting = (group,)
        try:
            for spec in specs:
                if spec.name not in known:
                    await tell(f"{spec.name}: starting")
                    note([*(one.name for one in group.specs), spec.name])
                    try:
                        await group.add(spec)
                    except RestartFailed:
                        note([one.name for one in group.specs])
                        raise
            for spec in reversed(present):
                if spec.name not in wanted:
                    await tell(f"{spec.name}: draining")
                    await group.remove(spec, self._worker_exit_s)
                    note([one.name for one in group.specs])
        finally:
            self.restarting = ()

    def to_change(self, name: str) -> Group:
        """Return the group of a model after checking that it may change now.

        Raises:
          RestartFailed: the model does not exist, a restart is running, or the fleet is being
            stopped.
        """
        group = self._models.get(name)
        if group is None or not name:
            known = ", ".join(one for one in self._models if one)
            raise RestartFailed(
                f"no model is called {name!r}; allowed: {known}"
                if known
                else "the only model of this fleet has no name and always runs; start the fleet "
                "with NAME=MODEL"
            )
        if self.stopping.is_set():
            raise RestartFailed("the fleet is being stopped")
        if group in self.restarting:
            raise RestartFailed(
                f"a restart or scaling of {name} is running; try again after its end"
            )
        return group

    def models(self) -> list[ModelStatus]:
        """Return the status of each model."""
        return [group.status for group in self._models.values()]

    async def _end_in_order(self) -> None:
        await self.stopping.wait()
        # Stop control first, so that it does not start anything.
        await see_out(self._control.lives(), self._config.worker_exit_s)
        # While the server drains, its streams still need the workers.
        await see_out(self._servers.lives(), self._server_exit_s)
        workers = chain.from_iterable(group.lives() for group in self._models.values())
        await see_out(list(workers), self._config.worker_exit_s)


def running_models(supervisor: Supervisor) -> list[str]:
    """Return the names of models with running or starting workers; "" for a single unnamed
    model."""
    states = (RunState.RUNNING, RunState.STARTING)
    return [one.name for one in supervisor.models() if one.state in states]


def require_no_restart(supervisor: Supervisor) -> None:
    """Check that no restart or scaling is running.

    Raises:
      RestartFailed: one is running.
    """
    if supervisor.restarting:
        names = " and ".join(group.shown for group in supervisor.restarting)
        raise RestartFailed(f"a restart or scaling of {names} is already running; wait for its end")


def running(groups: Iterable[Group]) -> list[Group]:
    """Return the groups with running processes."""
    return [group for group in groups if group.phase is GroupPhase.RUNNING]


async def stop_on_signals(
    supervisor: Supervisor, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Call `stop` on each signal: the first begins a clean shutdown, the second kills."""
    with trio.open_signal_receiver(*END_SIGNALS) as signals:
        task_status.started()
        async for _ in signals:
            supervisor.stop()


async def _until(stopping: trio.Event, do: Callable[[], Awaitable[None]]) -> None:
    """Run an action, and cancel it when the fleet is being stopped.

    Raises:
      RestartFailed: the fleet is being stopped, or the action failed.
    """
    failure: RestartFailed | None = None

    async def cancel_at_stop(scope: trio.CancelScope) -> None:
        await stopping.wait()
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel_at_stop, nursery.cancel_scope)
        try:
            await do()
        except RestartFailed as error:
            failure = error
        nursery.cancel_scope.cancel()
    if stopping.is_set():
        raise RestartFailed("the fleet was stopped during the operation")
    if failure is not None:
        raise failure
