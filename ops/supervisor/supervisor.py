"""The supervisor of a fleet on one machine: restarts dead processes, does rolling restarts on
command, and ends all in order: servers first, so that their streams finish, then the workers.
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
        of a model and role.
      stopped: names of the models whose workers are started by command alone.
      worker_drain_s: how long a worker that is restarted may let its sequences finish.
      starter: starts the processes; None spawns each.

    Attributes:
      stopping: set once the shutdown has begun, for whatever reason.
      run_id: of this fleet, from its start to its end.
      restarting: groups with processes that are restarted or scaled now.
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
        # The longest time from the request to a worker to leave to its end.
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
        """Run the fleet until `stop` has been called and every process is gone.

        Returns:
          Why it had to end, if not because that was asked for.
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
        """End a model whose worker cannot be kept alive; the whole fleet where it is the last.
        Control is started again later."""
        if group.phase is not GroupPhase.RUNNING:
            return
        group.failure = reason
        is_last = all(one.failure for one in self._models.values())
        is_control = group is self._control
        # Without control models stay as they are; with a setting that cannot be it never ran.
        is_bad_input = reason.exit_code == EXIT_BAD_INPUT
        is_needed = is_control and is_bad_input and not self._control_was_ready
        if group is self._servers or is_last or is_needed:
            self.fail(reason)
            return
        assert self._nursery is not None, "run has begun"
        if is_control:
            again = f"control is started again in {self._config.control_retry_s:g} s"
            reason = replace(reason, message=f"{reason.message}; {again}")
        self._watcher.failed(group.name or CONTROL_NAME, reason)
        group.end()
        self._nursery.start_soon(group.leave, self._worker_exit_s)

    async def _keep_control(self) -> None:
        """Start control again some time after each time that it was given up: without it no model
        is woken."""
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
        """Start control, which was given up, before its pause is over.

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
                f"control did not become ready: {why}; the others run, and it is started again in "
                f"{self._config.control_retry_s:g} s"
            ) from error

    async def wait_all_ready(self) -> None:
        """Wait until every process is ready that was started and whose model has not failed."""
        await self._begun.wait()
        for group in running(self._groups):
            try:
                await group.wait_ready()
            except StartAbandoned:
                continue

    def stop(self) -> None:
        """Begin the shutdown in order; called again, kill what still runs."""
        if self.stopping.is_set():
            for life in chain.from_iterable(group.lives() for group in self._groups):
                life.child.signal(signal.SIGKILL)
            return
        self._watcher.stopping()
        self.stopping.set()
        for group in self._groups:
            group.end()

    def fail(self, reason: GiveUp) -> None:
        """Begin the shutdown because of this; the first reason is the one that counts."""
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
        """Restart every process of some roles in turn while the others serve. Workers of models
        that do not run stay as they are.

        Args:
          roles: which.
          is_met: whether a server sees the worker of this name alive, asked once it is ready.
          tell: called before each step.
          models: of which the workers are restarted, and nothing else; none for all processes.

        Raises:
          RestartFailed: another restart is under way, there is nothing to restart, the fleet ends,
            there is no such model or it does not run, or a new process did not become ready. What
            was not restarted yet runs on.
        """
        require_no_restart(self)
        among = [self.to_change(name) for name in dict.fromkeys(models)] or running(self._groups)
        for group in among:
            if group.phase is not GroupPhase.RUNNING:
                raise RestartFailed(
                    f"the workers of {group.name} do not run; `triolet model load {group.name}` "
                    "starts them"
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
            raise RestartFailed(f"no process runs as {' or '.join(sorted(roles))}")
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
          name: of the model.
          tell: called before each step, with its words.

        Raises:
          RestartFailed: there is no such model, a restart is under way, the fleet or the model is
            stopped meanwhile, or a worker cannot be started.
        """
        group = self.to_change(name)
        if group.phase is GroupPhase.STOPPING:
            await tell(f"{name}: waiting for the end of its workers")
            await group.wait_gone()
            group = self.to_change(name)
        if group.phase is GroupPhase.STOPPED:
            self._launch(group)
            for spec in group.specs:
                await tell(f"{spec.name}: starting")
        try:
            await group.wait_ready()
        except StartAbandoned:
            why = f"model {name} was stopped meanwhile"
            message = why if group.failure is None else group.failure.message
            raise RestartFailed(message) from None

    async def stop_model(self, name: str, tell: Callable[[str], Awaitable[None]]) -> None:
        """Let the workers of a model leave in order, and wait until they are gone. Idempotent.

        Args:
          name: of the model.
          tell: called before each step, with its words.

        Raises:
          RestartFailed: there is no such model, a restart is under way, or the fleet ends.
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
        """Have the workers of a model run with other settings: one after the other, while the
        others serve. Where none runs the next start has them.

        Args:
          name: of the model.
          specs: of its workers and stand-ins, by name.
          is_met: whether each server uses the worker of this name.
          tell: called before each step, with its words.

        Raises:
          RestartFailed: there is no such model, a restart is under way, the fleet or the model is
            stopped meanwhile, or a worker did not become ready. All workers have the settings
            that they had.
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
        """Have a model more, whose workers `start_model` starts.

        Args:
          name: of the model.
          specs: its workers.
          spares: what stands in for the only one of a role.

        Raises:
          RestartFailed: there is one of this name, or the fleet ends.
        """
        if self.stopping.is_set():
            raise RestartFailed("the fleet is being stopped")
        if name in self._models:
            raise RestartFailed(f"a model is called {name!r} already")
        self._models[name] = Group(name, specs, spares, self._new_slot)

    def drop_model(self, name: str) -> None:
        """Have a model less.

        Raises:
          RestartFailed: there is no such model, it has workers, a restart is under way, or the
            fleet ends.
        """
        if self.to_change(name).phase is not GroupPhase.STOPPED:
            raise RestartFailed(f"model {name} has workers; they are stopped first")
        del self._models[name]

    async def scale(
        self,
        model: str,
        role: Role,
        specs: Sequence[ProcessSpec],
        note: Callable[[Sequence[str]], None],
        tell: Callable[[str], Awaitable[None]],
    ) -> None:
        """Have these workers of a model and role and no others, one change after the other.

        Args:
          model: its name; empty for the only one where that has none.
          role: of the workers.
          specs: the workers.
          note: called with the names of the model's workers before one starts and after one left.
          tell: called before each step, with its words.

        Raises:
          RestartFailed: there is no such model, a restart is under way, the fleet or the model is
            stopped meanwhile, or a worker cannot be started. What was not changed yet stays.
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
        """Return the workers of a model, which may change now.

        Raises:
          RestartFailed: there is no such model, a restart is under way, or the fleet ends.
        """
        group = self._models.get(name)
        if group is None or not name:
            known = ", ".join(one for one in self._models if one)
            raise RestartFailed(
                f"no model is called {name!r}; allowed: {known}"
                if known
                else "the only model of this fleet has no name, and runs as long as the fleet; "
                "start it as NAME=MODEL"
            )
        if self.stopping.is_set():
            raise RestartFailed("the fleet is being stopped")
        if group in self.restarting:
            raise RestartFailed(
                f"a restart or a scaling of {name} is under way; ask again after its end"
            )
        return group

    def models(self) -> list[ModelStatus]:
        """Return how each model is."""
        return [group.status for group in self._models.values()]

    async def _end_in_order(self) -> None:
        await self.stopping.wait()
        # It would begin what the end of the fleet is to undo.
        await see_out(self._control.lives(), self._config.worker_exit_s)
        # While the server drains, its streams still need the workers.
        await see_out(self._servers.lives(), self._server_exit_s)
        workers = chain.from_iterable(group.lives() for group in self._models.values())
        await see_out(list(workers), self._config.worker_exit_s)


def running_models(supervisor: Supervisor) -> list[str]:
    """Return the names of the models with workers that run or are to run; of the only one without
    a name the empty one."""
    states = (RunState.RUNNING, RunState.STARTING)
    return [one.name for one in supervisor.models() if one.state in states]


def require_no_restart(supervisor: Supervisor) -> None:
    """Look whether nothing keeps the workers of models from being restarted.

    Raises:
      RestartFailed: a restart is under way.
    """
    if supervisor.restarting:
        names = " and ".join(group.shown for group in supervisor.restarting)
        raise RestartFailed(
            f"a restart or a scaling of {names} is under way already; wait for its end"
        )


def running(groups: Iterable[Group]) -> list[Group]:
    """Return the groups whose processes run."""
    return [group for group in groups if group.phase is GroupPhase.RUNNING]


async def stop_on_signals(
    supervisor: Supervisor, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Turn signals into `stop`, for as long as it runs; a second signal kills at once."""
    with trio.open_signal_receiver(*END_SIGNALS) as signals:
        task_status.started()
        async for _ in signals:
            supervisor.stop()


async def _until(stopping: trio.Event, do: Callable[[], Awaitable[None]]) -> None:
    """Do something unless an event comes before its end.

    Raises:
      RestartFailed: the event came, or it failed.
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
        raise RestartFailed("the fleet was stopped meanwhile")
    if failure is not None:
        raise failure
