"""Control's decisions: which model to start or stop next, given requests, memory and operations.

No I/O. `tick` returns each step for the supervisor once; `step_done` reports its result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from transport.control_protocol import Activity, ModelState
from triolet.errors import LocalProtocolError
from triolet.units import show_size

from .model_states import HOLDING, RESTING, RUNNING, ModelEvent, after
from .models import Model
from .operations import NoRoom, Operation, OperationStatus, UnknownModel, WantedState
from .outlook import Outlook, absent
from .residency import (
    HOST,
    Fits,
    Later,
    LoadTimes,
    Never,
    choose_evicted,
    excess_bytes,
    is_expired,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from triolet.config import ControlConfig

    from ..supervisor.model_status import ModelStatus

BY_REQUEST: Final = "request"
BY_MEMORY: Final = "memory"
BY_KEEP_ALIVE: Final = "keep-alive"
BY_FAILURE: Final = "failed load"
BY_SUPERVISOR: Final = "supervisor"
GOAL: Final[dict[WantedState, frozenset[ModelState]]] = {
    WantedState.LOAD: RUNNING,
    WantedState.SLEEP: RESTING | {ModelState.ABSENT},
    WantedState.UNLOAD: frozenset({ModelState.STAGED, ModelState.ABSENT}),
}
"""States in which an operation has nothing to do."""


class ControlStep(NamedTuple):
    """A step of an operation for the supervisor.

    Attributes:
      operation: the operation.
      is_start: whether to start the model's workers or stop them.
    """

    operation: Operation
    is_start: bool


class Past(NamedTuple):
    """The state left by an earlier control process.

    Attributes:
      states: last known state by model.
      sizes: measured bytes by model.
      load_times: mean seconds of a load by model and origin state.
      unfinished: unfinished operations, oldest first.
    """

    states: Mapping[str, ModelState]
    sizes: Mapping[str, int]
    load_times: dict[tuple[str, ModelState], float]
    unfinished: Sequence[Operation]


class Controller:
    """The models of one fleet on this machine.

    Args:
      config: models and timeouts.
      budget_bytes: memory for the workers of all models on this machine.
      guesses: expected memory of each model, used until it is measured.
      past: state left by an earlier process.
      draw_id: returns a new operation id.
      now: current time.

    Attributes:
      models: models by name.
      budgets: bytes for the workers of all models by place: this machine, and each GPU that a
        worker reported.
      load_times: measured load times.
      outlook: memory of the models, and predictions of when they can serve.
      refusals: reasons why servers could not add models, by server and name.
      heard_at: time of each server's last message.
      changed: operations that changed since they were last written to the journal, by id.
    """

    def __init__(
        self,
        config: ControlConfig,
        budget_bytes: int,
        guesses: Mapping[str, int],
        past: Past,
        draw_id: Callable[[], str],
        now: float,
    ) -> None:
        self.budgets = {HOST: budget_bytes}
        self.changed: dict[str, Operation] = {}
        self.load_times = LoadTimes(past.load_times)
        self._config = config
        self._draw_id = draw_id
        self.heard_at: dict[str, float] = {}
        self.refusals: dict[str, dict[str, str]] = {}
        self.models: dict[str, Model] = {}
        self.outlook = Outlook(config, self.budgets, self.models, self.load_times, now)
        for one in config.models:
            # A draining model has ended since, or will be stopped again.
            asleep = past.states.get(one.name) in (ModelState.SLEEPING, ModelState.DRAINING)
            rest = ModelState.SLEEPING if asleep else ModelState.STAGED
            size_bytes = past.sizes.get(one.name, guesses[one.name])
            model = Model(one, rest, size_bytes, now, now, now)
            model.is_guess = one.name not in past.sizes
            model.is_measured = model.is_measured or not model.is_guess
            self.models[one.name] = model
        for operation in past.unfinished:
            self._take_up(operation, now)

    def model(self, name: str) -> Model:
        """Return a model.

        Raises:
          UnknownModel: no model has this name.
        """
        if name not in self.models:
            raise UnknownModel(name, self.models)
        return self.models[name]

    def order(
        self,
        name: str,
        wanted: WantedState,
        actor: str,
        now: float,
        wall: float,
        operation_id: str | None = None,
    ) -> Operation:
        """Return the operation that leads to a state: the running one, a new one, or a finished one
        if the model is already in that state.

        Args:
          name: name of the model.
          wanted: the state.
          actor: who requested it.
          now: current time.
          wall: current time since the epoch.
          operation_id: id for a new operation; None to draw one.

        Raises:
          UnknownModel: no model has this name.
          NoRoom: it can never be loaded.
        """
        model = self.model(name)
        live = model.live
        if live is not None and live.wanted is wanted:
            return live
        if wanted is WantedState.LOAD:
            self.outlook.refuse_hopeless(model, now)
        operation = Operation(operation_id or self._draw_id(), name, wanted, actor, wall)
        self.changed[operation.id] = operation
        if live is None and model.state in GOAL[wanted]:
            _end(operation, OperationStatus.DONE, f"{name} is already {model.state}")
            return operation
        if model.waiting is not None:
            self._finish(
                model, model.waiting, OperationStatus.FAILED, f"replaced by a later {wanted}"
            )
        model.waiting, model.waits_since = operation, now
        return operation

    def wake(self, name: str, now: float, wall: float) -> None:
        """Load a model that a request waits for, unless a load failed recently or is impossible."""
        model = self.models.get(name)
        if model is None or self.outlook.is_failing(model, now) or model.state is ModelState.ABSENT:
            return
        try:
            self.order(name, WantedState.LOAD, BY_REQUEST, now, wall)
        except NoRoom:
            return  # servers learn it from the news: there is no predicted time

    def tick(self, now: float, wall: float) -> list[ControlStep]:
        """Make all pending decisions and return new steps for the supervisor."""
        self._forget_silent(now)
        for resident in self.outlook.residents(now):
            if is_expired(resident, now):
                self.order(resident.name, WantedState.SLEEP, BY_KEEP_ALIVE, now, wall)
        residents = self.outlook.residents(now)
        staying = [one for one in residents if one.state is not ModelState.DRAINING]
        over_bytes = excess_bytes(staying, self.budgets)
        is_known = all(m.is_measured for m in self.models.values() if m.state in RUNNING)
        if over_bytes and is_known:
            min_s = self._config.min_residency_s
            for name in choose_evicted(residents, over_bytes, now, min_s):
                self.order(name, WantedState.SLEEP, BY_MEMORY, now, wall)
        self.outlook.turns.choose(self._waiting(), now)
        steps: list[ControlStep] = []
        while True:
            # Evictions are operations too, and may begin in the same tick.
            before = len(self._waiting())
            for model in self._waiting():
                steps += self._begin(model, now, wall)
            if len(self._waiting()) == before:
                return steps

    def step_done(self, operation: Operation, failure: str | None, now: float, wall: float) -> None:
        """Record the result of a step.

        Args:
          operation: operation of the step.
          failure: why the step failed; None if it succeeded.
          now: current time.
          wall: current time since the epoch.
        """
        model = self.models.get(operation.model)
        if model is None or model.running is not operation:
            return  # the model was dropped
        if failure is not None:
            self._finish(model, operation, OperationStatus.FAILED, failure)
            if operation.wanted is not WantedState.LOAD:
                self._move(model, ModelEvent.STAYED, now)
                return
            model.failed_at, model.load_began_at = now, None
            if model.state is ModelState.LOADING and model.waiting is None:
                # Some of its workers may run: stop them.
                self.order(model.config.name, WantedState.SLEEP, BY_FAILURE, now, wall)
            return
        if operation.wanted is WantedState.LOAD:
            if model.state is ModelState.LOADING:
                self._loaded(model, now)
            self._finish(model, operation, OperationStatus.DONE, f"{operation.model} is ready")
            return
        is_sleep = operation.wanted is WantedState.SLEEP
        self._move(model, ModelEvent.SLEPT if is_sleep else ModelEvent.UNLOADED, now)
        self._finish(model, operation, OperationStatus.DONE, f"{operation.model} is {model.state}")

    def note_progress(self, operation: Operation, text: str) -> None:
        """Set the progress text of an operation."""
        operation.progress = text
        self.changed[operation.id] = operation

    def note_files(self, name: str, *, are_there: bool, now: float) -> None:
        """Record whether a model's files exist."""
        model = self.models.get(name)
        if model is None:
            return  # the model was dropped
        if are_there and model.state is ModelState.ABSENT:
            self._move(model, ModelEvent.FOUND, now)
        elif not are_there and model.state in RESTING:
            self._move(model, ModelEvent.LOST, now)

    def note_workers(
        self, listed: Iterable[ModelStatus], asked_at: float, now: float, wall: float
    ) -> None:
        """Record the supervisor's report about workers.

        Args:
          listed: report of every model.
          asked_at: time of the request; models that changed since are skipped.
          now: current time.
          wall: current time since the epoch.
        """
        for its in listed:
            model = self.models.get(its.name)
            if model is None or model.changed_at > asked_at:
                continue
            model.workers = its.workers
            for gpu, total_bytes in model.note_gpus().items():
                self.budgets[gpu] = int(total_bytes * self._config.gpu_memory_share)
            if model.state is ModelState.DRAINING:
                continue
            if model.state in RESTING and its.is_there:
                self._move(model, ModelEvent.LOAD, now)  # started with the fleet, or externally
                model.is_measured = not model.is_guess
            if model.state in HOLDING and not its.is_there and model.live is None:
                # The workers ended without an operation. Stopping them again is harmless.
                model.failed_at = None if its.failure is None else now
                self.order(its.name, WantedState.SLEEP, BY_SUPERVISOR, now, wall)
            elif model.state is ModelState.LOADING and model.is_ready and model.running is None:
                self._loaded(model, now)
            elif model.state in RUNNING and not model.is_ready:
                self._move(model, ModelEvent.UNREADY, now)

    def note_size(self, name: str, size_bytes: int) -> None:
        """Record the measured memory of a model's workers; 0 if the system does not report it.

        The first measurement after a load adds the whole KV pool, because blocks become memory only
        when they are first used.
        """
        model = self.models.get(name)
        if model is None:
            return  # the model was dropped
        if size_bytes:
            is_first, model.is_guess = not model.is_measured, False
            # The pool of a GPU is not in this machine's memory.
            pool_bytes = 0 if model.gpu_bytes else model.config.pool_bytes
            held = size_bytes + pool_bytes if is_first else model.size_bytes
            model.size_bytes = max(held, size_bytes)
        model.is_measured = True

    def note_activity(self, said: Activity, now: float) -> None:
        """Record a server's report about its models."""
        self.heard_at[said.server] = now
        self.refusals[said.server] = said.refused
        for name in self.models.keys() - {one.name for one in said.models}:
            self.models[name].activity.pop(said.server, None)
        for one in said.models:
            model = self.models.get(one.name)
            if model is None:
                continue
            model.activity[said.server] = one
            model.note_requests(now)
            if one.last_used_s_ago is not None:
                used_at = now - max(0.0, one.last_used_s_ago)
                owner = self.models.get(model.config.workers_of, model)
                owner.last_used_at, owner.was_used = max(owner.last_used_at, used_at), True
            is_met = all(each.is_ready for each in model.activity.values())
            if model.state is ModelState.WARM and is_met:
                self._move(model, ModelEvent.MET, now)

    def _take_up(self, operation: Operation, now: float) -> None:
        """Continue an operation of an earlier process. Its steps may run twice."""
        model = self.models.get(operation.model)
        self.changed[operation.id] = operation
        if model is None:
            _end(operation, OperationStatus.FAILED, "the model was dropped from this fleet")
            return
        if model.waiting is not None:
            self._finish(
                model,
                model.waiting,
                OperationStatus.FAILED,
                f"replaced by a later {operation.wanted}",
            )
        operation.status, operation.progress = OperationStatus.WAITING, "resumed"
        model.waiting, model.waits_since = operation, now

    def _waiting(self) -> list[Model]:
        """Return the models with an operation that may begin, oldest operation first."""
        found = [m for m in self.models.values() if m.waiting is not None and m.running is None]
        return sorted(found, key=lambda model: model.waits_since)

    def _begin(self, model: Model, now: float, wall: float) -> Iterator[ControlStep]:
        """Begin the waiting operation of a model if possible."""
        operation = model.waiting
        assert operation is not None
        if model.state in GOAL[operation.wanted]:
            self._finish(
                model, operation, OperationStatus.DONE, f"{operation.model} is {model.state}"
            )
            return
        if operation.wanted is not WantedState.LOAD:
            yield self._run(model, operation, ModelEvent.END, now)
            return
        if model.state is ModelState.LOADING:
            yield self._run(model, operation, None, now)
            return
        if model.state is ModelState.ABSENT:
            self._finish(model, operation, OperationStatus.FAILED, absent(model))
            return
        room = self.outlook.room(model, now)
        match room:
            case Fits(()):
                yield self._run(model, operation, ModelEvent.LOAD, now)
            case Fits(names):
                for name in names:
                    self.order(name, WantedState.SLEEP, BY_MEMORY, now, wall)
                self._wait(model, operation, names, now)
            case Later(names):
                self._wait(model, operation, names, now)
            case Never():
                self._finish(
                    model, operation, OperationStatus.FAILED, self.outlook.too_large(model, room)
                )

    def _run(
        self, model: Model, operation: Operation, event: ModelEvent | None, now: float
    ) -> ControlStep:
        if event is ModelEvent.LOAD:
            model.origin, model.load_began_at = model.state, now
        if event is not None:
            self._move(model, event, now)
        model.running, model.waiting = operation, None
        operation.status, operation.progress = (
            OperationStatus.RUNNING,
            f"{operation.model}: {model.state}",
        )
        self.changed[operation.id] = operation
        return ControlStep(operation, is_start=operation.wanted is WantedState.LOAD)

    def _wait(self, model: Model, operation: Operation, names: Sequence[str], now: float) -> None:
        """Set what an operation waits for, or fail it after `room_timeout_s`."""
        progress = f"waiting for memory of {', '.join(names)}"
        waited_s = now - model.waits_since
        if waited_s >= self._config.room_timeout_s:
            shown = show_size(model.size_bytes)
            why = (
                f"no room for {shown} after {waited_s:.0f} s: {', '.join(names)} are busy or were "
                f"loaded recently; run `triolet model sleep {names[0]}`, or raise "
                "control.memory_bytes"
            )
            model.failed_at = now
            self._finish(model, operation, OperationStatus.FAILED, why)
        elif progress != operation.progress:
            self.note_progress(operation, progress)

    def _loaded(self, model: Model, now: float) -> None:
        self._move(model, ModelEvent.READY, now)
        if model.load_began_at is not None:
            self.load_times.add(model.config.name, model.origin, now - model.load_began_at)
        model.load_began_at = model.failed_at = None
        model.last_used_at = max(model.last_used_at, model.since)
        # Servers report again when they have connected to the new workers.
        model.activity = {
            server: msgspec.structs.replace(one, is_ready=False)
            for server, one in model.activity.items()
        }

    def _move(self, model: Model, event: ModelEvent, now: float) -> None:
        model.state, model.changed_at = after(model.state, event), now
        if event in (ModelEvent.LOAD, ModelEvent.STAYED):
            model.since = now
        if event is ModelEvent.LOAD:
            model.is_measured = False

    def _finish(
        self, model: Model, operation: Operation, status: OperationStatus, text: str
    ) -> None:
        _end(operation, status, text)
        self.changed[operation.id] = operation
        if model.running is operation:
            model.running = None
        elif model.waiting is operation:
            model.waiting = None
        else:
            raise LocalProtocolError(f"operation {operation.id} has ended twice")

    def _forget_silent(self, now: float) -> None:
        """Forget servers that have been silent for `silence_s`, and their requests."""
        for server, heard_at in list(self.heard_at.items()):
            if now - heard_at < self._config.silence_s:
                continue
            del self.heard_at[server], self.refusals[server]
            for model in self.models.values():
                model.activity.pop(server, None)
                model.note_requests(now)


def _end(operation: Operation, status: OperationStatus, text: str) -> None:
    operation.status, operation.progress = status, text
