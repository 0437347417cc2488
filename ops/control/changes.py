"""Models that are added to a fleet while it runs, dropped, and switched to another version; their
adapters too.

Each step may be done again: control that was killed is followed by one that begins an unfinished
operation anew. What cannot be added to its end is taken back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio

from triolet.config import MAX_MODELS, FleetModelConfig
from triolet.errors import ConfigError

from ..exit_codes import CommandFailed
from ..supervisor.supervisor_socket import (
    AddModelRequest,
    ServeModelRequest,
    ask,
    ask_models,
)
from .adapters import AdapterChanges
from .auditing import is_of_port
from .memory import expected_bytes
from .model_steps import ModelSteps
from .operations import (
    DONE_WORDS,
    Conflict,
    NoRoom,
    Operation,
    OperationFailed,
    OperationStatus,
    UnknownModel,
    WantedState,
)
from .switches import Switches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from triolet.config import ControlConfig, ControlledModelConfig

    from ..supervisor.supervisor_socket import ModelsAnswer
    from .controller import Controller

log = structlog.get_logger(__name__)

BY_RECONCILING: Final = "supervisor"
UNDER_WAY: Final = "{wanted} of {name} is under way (operation {id}); ask again after its end"


class Changes:
    """The changes of one fleet's models.

    Args:
      config: bounds.
      controller: knows the models, and decides about their workers.
      supervisor: socket of what has their processes.
      settle: decides, writes down and tells, after each change.
      forget: lets the journal forget a model.
      wall: returns the seconds since the epoch.
      nursery: for what operations do.

    Attributes:
      under_way: operation of each model that is added, dropped or switched, or whose adapters
        change, by its name. A switch is that of both versions.
      steps: that operations are made of.
      switches: of models to other versions.
    """

    def __init__(
        self,
        config: ControlConfig,
        controller: Controller,
        supervisor: Path,
        settle: Callable[[], None],
        forget: Callable[[str], None],
        wall: Callable[[], float],
        nursery: trio.Nursery,
    ) -> None:
        self.under_way: dict[str, Operation] = {}
        self.steps = ModelSteps(config, controller, supervisor, settle, forget)
        self.switches = Switches(controller, supervisor, self.steps)
        self._config = config
        self._controller = controller
        self._supervisor = supervisor
        self._settle = settle
        self._wall = wall
        self._nursery = nursery
        self._adapters = AdapterChanges(
            config,
            controller,
            supervisor,
            self.steps.tell,
            self.steps.persist,
            lambda: trio.current_time() >= self.steps.met_at,
        )

    def require_free(self, name: str) -> None:
        """Look whether other orders for a model may be given.

        Raises:
          Conflict: it is being added, dropped or switched.
        """
        live = self.under_way.get(name)
        if live is not None:
            raise Conflict(UNDER_WAY.format(wanted=live.wanted, name=live.subject, id=live.id))

    def require(self, operation: Operation) -> None:
        """Look whether a model may be added, dropped or switched, or its adapters changed.

        Raises:
          Conflict: that is under way, there is one of this name, or there are too many.
          UnknownModel: there is none of this name.
        """
        for name in operation.names:
            self.require_free(name)
        name, known, switch = operation.model, self._controller.models, operation.switch
        if operation.wanted is WantedState.ADD or switch is not None:
            if name in known:
                raise Conflict(
                    f"there is a model {name} already; `triolet model drop {name}` comes first, or "
                    "another name"
                )
            if len({*known, *self.under_way}) >= MAX_MODELS:
                raise Conflict(f"this fleet has {len(known)} models; allowed: {MAX_MODELS}")
        needed = name if switch is None else switch.replaced
        if operation.wanted is not WantedState.ADD and needed not in known:
            raise UnknownModel(needed, known)

    def begin(self, operation: Operation) -> None:
        """Do an operation from its beginning; the journal has it already, or gets it now."""
        self.under_way |= dict.fromkeys(operation.names, operation)
        self._controller.changed[operation.id] = operation
        operation.status = OperationStatus.RUNNING
        self._nursery.start_soon(self._run, operation)

    def note_listed(self, listed: ModelsAnswer, asked_at: float) -> None:
        """Take in which models the supervisor has: it is right about those that do not change.

        Args:
          listed: what it said.
          asked_at: when it was asked.
        """
        if not listed.configs or asked_at <= self.steps.changed_at:
            return
        self.switches.routes = listed.routes
        told = {one.name: one for one in listed.configs}
        for name in [one for one in self._controller.models if one not in told]:
            if name not in self.under_way:
                self.steps.drop(name)
        for name, config in told.items():
            if name in self.under_way:
                continue
            if name not in listed.served:
                # Nothing half-done stays: what was to be done with it is not known any more.
                operation = Operation(
                    f"{listed.run}-{name}",
                    name,
                    WantedState.DROP,
                    BY_RECONCILING,
                    self._wall(),
                    run=listed.run,
                )
                self.begin(operation)
            elif name not in self._controller.models:
                self.steps.add(config, expected_bytes(config))
            elif _what_it_is(self._controller.models[name].config) != _what_it_is(config):
                self._adapters.note(config)  # control was not told how a change ended

    async def _run(self, operation: Operation) -> None:
        work = {
            WantedState.ADD: self._add_all,
            WantedState.DROP: self._drop_all,
            WantedState.SWITCH: self.switches.run,
            WantedState.LOAD_ADAPTER: self._adapters.load,
            WantedState.UNLOAD_ADAPTER: self._adapters.unload,
        }[operation.wanted]
        try:
            listed = await ask_models(self._supervisor)
            if listed.run != operation.run:
                raise OperationFailed(
                    f"the fleet that {operation.subject} was asked of has ended before it was done"
                )
            self.switches.routes = listed.routes
            await work(operation)
        except (OperationFailed, CommandFailed, NoRoom) as error:
            operation.status, operation.progress = OperationStatus.FAILED, str(error)
        else:
            told = f"{operation.subject} is {DONE_WORDS[operation.wanted]}"
            operation.status, operation.progress = OperationStatus.DONE, told
        self.steps.changed_at = trio.current_time()
        for name in operation.names:
            del self.under_way[name]
        self._controller.changed[operation.id] = operation
        self._settle()

    async def _add_all(self, operation: Operation) -> None:
        """Add a model, or leave nothing of it.

        Raises:
          Failed: it was not added.
          CommandFailed: the same.
          NoRoom: the same.
        """
        name = operation.model
        try:
            model = msgspec.json.decode(operation.settings, type=FleetModelConfig)
        except (msgspec.DecodeError, ConfigError) as error:
            raise OperationFailed(f"the settings of {name} cannot be read: {error}") from error
        # What is on disk may change after the admin routes have looked at it.
        request = AddModelRequest(name, model, is_of_port(operation))
        config = await self.steps.ask_added(operation, request)
        self.steps.add(config, await trio.to_thread.run_sync(expected_bytes, config))
        try:
            if model.start:
                await self.steps.load(operation)
            await ask(self._supervisor, ServeModelRequest(name, is_served=True))
            await self.steps.wait_served(operation, name)
        except (OperationFailed, CommandFailed, NoRoom):
            await self.steps.take_back(operation)
            raise

    async def _drop_all(self, operation: Operation) -> None:
        """Drop a model: its requests end first, then its workers.

        Raises:
          CommandFailed: it is needed, or its workers could not be ended; servers have it again.
        """
        name = operation.model
        self.steps.tell(operation, f"{name}: its requests finish")
        await ask(self._supervisor, ServeModelRequest(name, is_served=False))
        await self.steps.wait_let_go(name)
        try:
            await self.steps.end(operation, name)
        except CommandFailed:
            await ask(self._supervisor, ServeModelRequest(name, is_served=True))
            raise
        self.steps.drop(name)


def _what_it_is(config: ControlledModelConfig) -> tuple[str, Mapping[str, str]]:
    """Return the version and the adapters of a model."""
    return config.digest, config.adapters
