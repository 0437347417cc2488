"""Operations that change which models, versions and adapters a running fleet has.

All steps are idempotent: after a crash, the next control process restarts unfinished operations
from the beginning. An addition that fails is rolled back.
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
NO_SUPERVISOR: Final = (
    "this control runs without `triolet serve`: start and stop models and adapters on the hosts of "
    "their workers; it only moves routes (`triolet model switch`)"
)
UNDER_WAY: Final = "{wanted} of {name} is running (operation {id}); try again after its end"


class Changes:
    """Runs the operations that change one fleet's models.

    Args:
      config: timeouts.
      controller: the fleet's models and the decisions about their workers.
      supervisor: socket of the supervisor.
      settle: called after each change, to decide, write the journal and notify servers.
      forget: removes a model from the journal.
      wall: returns the seconds since the epoch.
      nursery: runs the operations.
      fence: fence of a control without a supervisor; 0 with one.

    Attributes:
      under_way: running operation of each model, by name. A switch is listed under both versions.
      steps: steps shared by operations.
      switches: switches of models to other versions.
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
        fence: int,
    ) -> None:
        self.under_way: dict[str, Operation] = {}
        self.steps = ModelSteps(config, controller, supervisor, settle, forget)
        self.switches = Switches(controller, supervisor, self.steps, fence)
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
        """Check that no running operation changes a model.

        Raises:
          Conflict: it is being added, dropped or switched.
        """
        live = self.under_way.get(name)
        if live is not None:
            raise Conflict(UNDER_WAY.format(wanted=live.wanted, name=live.subject, id=live.id))

    def require(self, operation: Operation) -> None:
        """Check that an operation may begin.

        Raises:
          Conflict: the model is being changed, its name is taken, or there are too many models.
          UnknownModel: no model has this name.
        """
        if self.switches.fence and operation.switch is None:
            raise Conflict(NO_SUPERVISOR)
        for name in operation.names:
            self.require_free(name)
        name, known, switch = operation.model, self._controller.models, operation.switch
        if operation.wanted is WantedState.ADD or (switch is not None and not self.switches.fence):
            if name in known:
                raise Conflict(
                    f"a model {name} exists already; run `triolet model drop {name}` first, or "
                    "choose another name"
                )
            if len({*known, *self.under_way}) >= MAX_MODELS:
                raise Conflict(f"this fleet has {len(known)} models; allowed: {MAX_MODELS}")
        needed = name if switch is None else switch.replaced
        if operation.wanted is not WantedState.ADD and needed not in known:
            raise UnknownModel(needed, known)

    def begin(self, operation: Operation) -> None:
        """Start an operation from its beginning. The journal contains it or receives it now."""
        self.under_way |= dict.fromkeys(operation.names, operation)
        self._controller.changed[operation.id] = operation
        operation.status = OperationStatus.RUNNING
        self._nursery.start_soon(self._run, operation)

    def release(self, operation: Operation) -> None:
        """Let other operations change the models of one that has ended. A rollout of an earlier
        control may have them by now."""
        for name in {*operation.names}:  # a switch to the version that serves has one twice
            if self.under_way.get(name) is operation:
                del self.under_way[name]

    def note_listed(self, listed: ModelsAnswer, asked_at: float) -> None:
        """Reconcile with the supervisor's models, except those that are being changed.

        Args:
          listed: answer of the supervisor.
          asked_at: time of the request.
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
                # Remove a half-added model: the operation that added it is lost.
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
                self._adapters.note(config)  # the end of a change was missed

    async def _run(self, operation: Operation) -> None:
        work = {
            WantedState.ADD: self._add_all,
            WantedState.DROP: self._drop_all,
            WantedState.SWITCH: self.switches.run,
            WantedState.LOAD_ADAPTER: self._adapters.load,
            WantedState.UNLOAD_ADAPTER: self._adapters.unload,
        }[operation.wanted]
        try:
            if not self.switches.fence:
                listed = await ask_models(self._supervisor)
                if listed.run != operation.run:
                    raise OperationFailed(
                        f"the fleet ended before the operation on {operation.subject} was done"
                    )
                self.switches.routes = listed.routes
            await work(operation)
        except (OperationFailed, CommandFailed, NoRoom) as error:
            operation.status, operation.progress = OperationStatus.FAILED, str(error)
        else:
            told = f"{operation.subject} is {DONE_WORDS[operation.wanted]}"
            operation.status, operation.progress = OperationStatus.DONE, told
        self.steps.changed_at = trio.current_time()
        self.release(operation)
        self._controller.changed[operation.id] = operation
        self._settle()

    async def _add_all(self, operation: Operation) -> None:
        """Add a model. On failure, remove it again.

        Raises:
          OperationFailed: it was not added.
          CommandFailed: it was not added.
          NoRoom: it was not added: there is no memory for it.
        """
        name = operation.model
        try:
            model = msgspec.json.decode(operation.settings, type=FleetModelConfig)
        except (msgspec.DecodeError, ConfigError) as error:
            raise OperationFailed(f"the settings of {name} cannot be read: {error}") from error
        # The supervisor checks the path again: it may have changed since the admin check.
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
        """Drop a model: let its requests finish, then stop its workers.

        Raises:
          CommandFailed: the model is needed, or its workers did not stop; servers use it again.
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
