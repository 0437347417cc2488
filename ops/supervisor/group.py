"""A group of processes that start and stop together: the workers of one model, the servers, or the
control process."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final

import trio

from triolet.ids import Role

from .model_status import ModelStatus, RunningWorker, RunState
from .rolling import ORDER
from .slot import RestartFailed, StartAbandoned, see_out

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from .process_spec import ProcessSpec
    from .restart_policy import GiveUp
    from .slot import Life, Slot


class GroupPhase(Enum):
    """Whether the processes of a group run."""

    STOPPED = auto()
    """No process exists."""
    RUNNING = auto()
    """Each process is restarted when it ends."""
    STOPPING = auto()
    """No process is started; the running ones are asked to exit."""


class GroupEvent(Enum):
    """An event of a group."""

    START = auto()
    END = auto()
    GONE = auto()
    """Its last process has ended."""


TRANSITIONS: Final[dict[GroupPhase, dict[GroupEvent, GroupPhase]]] = {
    GroupPhase.STOPPED: {GroupEvent.START: GroupPhase.RUNNING},
    GroupPhase.RUNNING: {GroupEvent.END: GroupPhase.STOPPING},
    GroupPhase.STOPPING: {GroupEvent.GONE: GroupPhase.STOPPED},
}


STATES: Final = {
    GroupPhase.STOPPED: RunState.STOPPED,
    GroupPhase.RUNNING: RunState.RUNNING,
    GroupPhase.STOPPING: RunState.STOPPING,
}


class Group:
    """Processes that start and stop together.

    Args:
      name: name of the model; empty for servers, control, and a single unnamed model.
      specs: the processes.
      spares: replacements that run while the only process of a role restarts.
      new_slot: creates a slot and runs its processes in the nursery.

    Attributes:
      name: name of the group.
      specs: current processes.
      spares: replacements by role.
      slots: slots of the last start by name, including those of `spares`.
      failure: why the group failed; reset by the next start.
      phase: whether its processes run.
    """

    def __init__(
        self,
        name: str,
        specs: Sequence[ProcessSpec],
        spares: Sequence[ProcessSpec],
        new_slot: Callable[[ProcessSpec, trio.Nursery], Slot],
    ) -> None:
        self.name = name
        self.specs = list(specs)
        self.spares: Mapping[Role, ProcessSpec] = {spec.role: spec for spec in spares}
        self.slots: dict[str, Slot] = {}
        self.failure: GiveUp | None = None
        self.phase = GroupPhase.STOPPED
        self._new_slot = new_slot
        self._gave_up: Callable[[Group, GiveUp], None] | None = None
        self._nursery: trio.Nursery | None = None
        self._ended_s = 0.0
        self._has_slots = trio.Event()
        self._gone = trio.Event()
        self._gone.set()

    @property
    def shown(self) -> str:
        """Name of the group in messages."""
        names = ", ".join(spec.name for spec in self.specs)
        return f"model {self.name}" if self.name else names or "a group without processes"

    def begin(self) -> None:
        """Mark the group as running. Call `run` next."""
        self._apply(GroupEvent.START)
        self.failure = None
        self._ended_s = self.worker_seconds
        self._gone, self._has_slots = trio.Event(), trio.Event()
        self.slots = {}

    async def run(self, gave_up: Callable[[Group, GiveUp], None]) -> None:
        """Keep the processes alive until `end`. Return when all of them are gone.

        Args:
          gave_up: called when a process cannot be kept alive; must end the group.
        """

        async def keep(slot: Slot) -> None:
            reason = await slot.keep()
            if reason is not None:
                gave_up(self, reason)

        async with trio.open_nursery() as nursery:
            self._nursery, self._gave_up = nursery, gave_up
            for spec in (*self.specs, *self.spares.values()):
                self.slots[spec.name] = self._new_slot(spec, nursery)
            if self.phase is not GroupPhase.RUNNING:
                self._end_slots()
            for spec in self.specs:
                nursery.start_soon(keep, self.slots[spec.name])
            self._has_slots.set()
        self._nursery = self._gave_up = None
        self._apply(GroupEvent.GONE)
        self._gone.set()

    def end(self) -> None:
        """Stop restarting processes. Running processes get no signal."""
        if self.phase is not GroupPhase.RUNNING:
            return
        self._apply(GroupEvent.END)
        self._end_slots()

    def _end_slots(self) -> None:
        for slot in self.slots.values():
            slot.end()

    def use(self, specs: Mapping[str, ProcessSpec]) -> None:
        """Use other settings from the next start of each process on.

        Args:
          specs: new settings by name; other processes keep theirs.
        """
        self.specs = [specs.get(one.name, one) for one in self.specs]
        self.spares = {role: specs.get(one.name, one) for role, one in self.spares.items()}
        for name, slot in self.slots.items():
            if name in specs:
                slot.use(specs[name])

    async def add(self, spec: ProcessSpec) -> None:
        """Add a process. If the group runs, start it and wait until it is ready.

        Raises:
          RestartFailed: it did not become ready, or the group was stopped; it is not added.
        """
        self.specs.append(spec)
        if self._nursery is None or self.phase is not GroupPhase.RUNNING:
            return
        slot = self.slots[spec.name] = self._new_slot(spec, self._nursery)
        failures: list[GiveUp] = []
        was_ready = False

        async def keep() -> None:
            reason = await slot.keep()
            if reason is not None and was_ready and self._gave_up is not None:
                self._gave_up(self, reason)
            elif reason is not None:  # a new process that fails does not end the group
                failures.append(reason)
                slot.end()

        self._nursery.start_soon(keep)
        try:
            await slot.wait_ready()
        except StartAbandoned as error:
            self.specs.remove(spec)
            if not slot.lives:  # otherwise the shutdown of the group waits for them
                self._ended_s += slot.worker_seconds
                del self.slots[spec.name]
            message = failures[0].message if failures else str(error)
            raise RestartFailed(message) from error
        was_ready = True

    async def remove(self, spec: ProcessSpec, grace_s: float) -> None:
        """Remove a process. If it runs, let it drain and exit.

        Args:
          spec: the process.
          grace_s: time after which it is killed.
        """
        self.specs.remove(spec)
        slot = self.slots.get(spec.name)
        if slot is not None:
            slot.end()
            await see_out(tuple(slot.lives), grace_s)
            self._ended_s += slot.worker_seconds
            del self.slots[spec.name]

    async def leave(self, grace_s: float) -> None:
        """Let the workers drain and exit, prefill first, because its output is work for decode.

        Args:
          grace_s: time after which the workers of a role are killed.
        """
        for role in ORDER:
            await see_out(self.lives((role,)), grace_s)

    def lives(self, roles: Collection[Role] = tuple(Role)) -> list[Life]:
        """Return the running processes of some roles."""
        return [
            life for slot in self.slots.values() if slot.spec.role in roles for life in slot.lives
        ]

    async def wait_begun(self) -> None:
        """Wait until the current start has created its slots."""
        await self._has_slots.wait()

    async def wait_ready(self) -> None:
        """Wait until every process is ready.

        Raises:
          StartAbandoned: the group was stopped; `failure` is set if it failed.
        """
        if self.phase is not GroupPhase.RUNNING:
            raise StartAbandoned(f"{self.shown} is being stopped")
        slots = self.slots  # keep those of this start: the next one replaces them
        await self._has_slots.wait()
        for spec in tuple(self.specs):
            try:
                if spec.name in slots:
                    await slots[spec.name].wait_ready()
            except StartAbandoned:
                if spec in self.specs or self.phase is not GroupPhase.RUNNING:
                    raise
                # Only this process was removed: wait for the others.

    async def wait_gone(self) -> None:
        """Wait until all processes have ended."""
        await self._gone.wait()

    @property
    def worker_seconds(self) -> float:
        """Total run time of its processes over all starts [s]."""
        return self._ended_s + sum(slot.worker_seconds for slot in self.slots.values())

    @property
    def status(self) -> ModelStatus:
        """The status of the model and its workers, for commands."""
        workers = [_status_of(spec, self.slots.get(spec.name)) for spec in self.specs]
        state = STATES[self.phase]
        if state is RunState.RUNNING and not all(worker.is_ready for worker in workers):
            state = RunState.STARTING
        if state is RunState.STOPPED and self.failure is not None:
            state = RunState.FAILED
        spares = [_status_of(one, self.slots.get(one.name)) for one in self.spares.values()]
        workers += [spare for spare in spares if spare.pid is not None]
        failure = None if self.failure is None else self.failure.message
        return ModelStatus(self.name, state, workers, failure, round(self.worker_seconds, 6))

    def _apply(self, event: GroupEvent) -> None:
        self.phase = TRANSITIONS[self.phase][event]


def _status_of(spec: ProcessSpec, slot: Slot | None) -> RunningWorker:
    life = None if slot is None else next(iter(slot.lives[-1:]), None)
    pid = None if life is None else life.child.pid
    is_ready = life is not None and life.ready.is_set() and not life.is_leaving
    gpu_memory = None if life is None else life.gpu_memory
    return RunningWorker(spec.name, spec.role, pid, is_ready, gpu_memory)
