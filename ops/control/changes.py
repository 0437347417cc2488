"""Models that are added to a fleet while it runs, dropped, and switched to another version; their
adapters too.

Each step may be done again: control that was killed is followed by one that begins an unfinished
operation anew. What cannot be added to its end is taken back.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio

from triolet.config import MAX_MODELS, FleetModelConfig
from triolet.control_protocol import ModelState
from triolet.errors import ConfigError
from triolet.units import SECONDS

from ..exit_codes import CommandFailed
from ..supervisor.supervisor_socket import (
    AddModelRequest,
    AddVersionRequest,
    DropModelRequest,
    RouteRequest,
    ServeModelRequest,
    ask,
    ask_config,
    ask_models,
)
from .adapters import AdapterChanges
from .auditing import is_of_port
from .memory import expected_bytes
from .model_states import HOLDING
from .models import Model
from .operations import (
    DONE_WORDS,
    Conflict,
    NoRoom,
    Operation,
    OperationFailed,
    OperationStatus,
    SwitchOrder,
    UnknownModel,
    WantedState,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from triolet.config import ControlConfig, ControlledModelConfig
    from triolet.config.routes import Route

    from ..supervisor.supervisor_socket import ModelsAnswer
    from .controller import Controller

log = structlog.get_logger(__name__)

BY_ADD: Final = "add"
BY_RECONCILING: Final = "supervisor"
RETRY_S: Final = 1.0 * SECONDS
"""Before the supervisor is asked again for what it refuses during a restart of workers."""
MEET_S: Final = 2.0 * SECONDS
"""From the moment control listens until every server that runs has dialled it: they try at least
every second."""
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
      routes: of which servers are told, by public name, as the supervisor last said.
      met_at: when every server that runs has said which models it has; inf before control listens.
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
        self.routes: dict[str, Route] = {}
        self.met_at = math.inf
        self._config = config
        self._controller = controller
        self._supervisor = supervisor
        self._settle = settle
        self._forget = forget
        self._wall = wall
        self._nursery = nursery
        self._changed_at = 0.0
        self._adapters = AdapterChanges(
            config,
            controller,
            supervisor,
            self._tell,
            self._persist,
            lambda: trio.current_time() >= self.met_at,
        )

    def note_listening(self) -> None:
        """Take in that servers reach control from now on."""
        self.met_at = trio.current_time() + MEET_S

    def require_free(self, name: str) -> None:
        """Look whether other orders for a model may be given.

        Raises:
          Conflict: it is being added, dropped or switched.
        """
        live = self.under_way.get(name)
        if live is not None:
            raise Conflict(UNDER_WAY.format(wanted=live.wanted, name=live.subject, id=live.id))

    def version_of(self, name: str) -> str:
        """Return the version that a public name stands for; the name itself where it has none."""
        route = self.routes.get(name)
        return name if route is None or name in self._controller.models else route.stable

    def plan_switch(self, name: str, ref: str) -> tuple[str, SwitchOrder]:
        """Return a name for the version that is to come, and what is to be done.

        Args:
          name: of the version that answers now, or its public name.
          ref: of the version that comes.

        Raises:
          UnknownModel: there is none of this name.
        """
        known, replaced = self._controller.models, self.version_of(name)
        if replaced not in known:
            raise UnknownModel(name, known)
        names = (one for one, route in self.routes.items() if replaced in route.shares)
        public = next(names, replaced)
        number = replaced.removeprefix(f"{public}-")
        first = int(number) + 1 if number != replaced and number.isdecimal() else 2
        taken = {*known, *self.under_way}
        new = next(one for n in count(first) if (one := f"{public}-{n}") not in taken)
        return new, SwitchOrder(public, replaced, ref)

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
        if not listed.configs or asked_at <= self._changed_at:
            return
        self.routes = listed.routes
        told = {one.name: one for one in listed.configs}
        for name in [one for one in self._controller.models if one not in told]:
            if name not in self.under_way:
                self._drop(name)
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
                self._add(config, expected_bytes(config))
            elif self._controller.models[name].config.adapters != config.adapters:
                self._adapters.note(config)  # control was not told how a change ended

    async def _run(self, operation: Operation) -> None:
        work = {
            WantedState.ADD: self._add_all,
            WantedState.DROP: self._drop_all,
            WantedState.SWITCH: self._switch_all,
            WantedState.LOAD_ADAPTER: self._adapters.load,
            WantedState.UNLOAD_ADAPTER: self._adapters.unload,
        }[operation.wanted]
        try:
            listed = await ask_models(self._supervisor)
            if listed.run != operation.run:
                raise OperationFailed(
                    f"the fleet that {operation.subject} was asked of has ended before it was done"
                )
            self.routes = listed.routes
            await work(operation)
        except (OperationFailed, CommandFailed, NoRoom) as error:
            operation.status, operation.progress = OperationStatus.FAILED, str(error)
        else:
            told = f"{operation.subject} is {DONE_WORDS[operation.wanted]}"
            operation.status, operation.progress = OperationStatus.DONE, told
        self._changed_at = trio.current_time()
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
        config = await self._ask_added(operation, request)
        self._add(config, await trio.to_thread.run_sync(expected_bytes, config))
        try:
            if model.start:
                await self._load(operation)
            await ask(self._supervisor, ServeModelRequest(name, is_served=True))
            await self._wait_served(operation, name)
        except (OperationFailed, CommandFailed, NoRoom):
            await self._take_back(operation)
            raise

    async def _ask_added(
        self, operation: Operation, request: AddModelRequest | AddVersionRequest
    ) -> ControlledModelConfig:
        """Let the supervisor have a model more.

        Raises:
          Failed: it took too long; nothing of it stays.
          CommandFailed: it cannot be had.
        """
        limit_s = self._config.operation_timeout_s
        with trio.move_on_after(limit_s):
            return await ask_config(self._supervisor, request, partial(self._tell, operation))
        await self._take_back(operation)
        raise OperationFailed(_late("looking at it", limit_s))

    async def _switch_all(self, operation: Operation) -> None:
        """Give a public name to another version, or leave all as it was: the version that comes is
        loaded beside the other one, gets all new requests at once, and then the other one goes.

        Raises:
          Failed: the version that comes cannot serve.
          CommandFailed: the same, or the workers of the other one could not be ended.
          NoRoom: there is no memory for both.
        """
        order = operation.switch
        assert order is not None, "a switch has its order"
        route = self.routes.get(order.public_name)
        if route is None or route.stable != operation.model:  # else it was moved already
            request = AddVersionRequest(
                operation.model, order.replaced, order.ref, is_of_port(operation)
            )
            config = await self._ask_added(operation, request)
            if config.name == order.replaced:  # it computes alike, and is there already
                self._controller.models[config.name].config = config
                await self._wait_served(operation, config.name)
                return
            await self._move(operation, config, order.replaced, route)
        self._tell(operation, f"{order.replaced}: its requests finish")
        await self._wait_let_go(order.replaced)
        await self._end(operation, order.replaced)
        self._drop(order.replaced)

    async def _move(
        self,
        operation: Operation,
        config: ControlledModelConfig,
        replaced: str,
        route: Route | None,
    ) -> None:
        """Load a version beside the one that it replaces, and give it all new requests.

        Args:
          operation: the switch.
          config: of the version that comes.
          replaced: name of the other one.
          route: of their public name, as it is now; None where it has none.

        Raises:
          Failed: it cannot serve; it is taken back.
          CommandFailed: the same.
          NoRoom: there is no memory for both.
        """
        new, revision = config.name, 0 if route is None else route.revision
        is_known = route is not None and new in route.shares
        self._add(config, await trio.to_thread.run_sync(expected_bytes, config))
        models = self._controller.models
        kept = [models[new], *(one for one in (models[replaced],) if one.state in HOLDING)]
        for model in kept:
            model.is_kept = True
        try:
            await self._load(operation)
            beside = RouteRequest(new, replaced, revision, is_moved=False)
            await ask(self._supervisor, beside)
            await self._wait_served(operation, new, is_ready=True)
            moved = RouteRequest(new, replaced, revision + (not is_known), is_moved=True)
            await ask(self._supervisor, moved)
        except (OperationFailed, CommandFailed, NoRoom):
            await self._take_back(operation)
            raise
        finally:
            for model in kept:
                model.is_kept = False

    async def _load(self, operation: Operation) -> None:
        """Start the workers of a model that is being added, as an order would.

        Raises:
          Failed: they do not run.
          NoRoom: there is no memory for them.
        """
        now = trio.current_time()
        load = self._controller.order(
            operation.model, WantedState.LOAD, BY_ADD, now, operation.created_at
        )
        self._settle()
        while not load.is_over:
            await trio.sleep(self._config.tick_s)
            self._tell(operation, load.progress)
        if load.status is OperationStatus.FAILED:
            raise OperationFailed(load.progress)

    async def _wait_served(
        self, operation: Operation, name: str, *, is_ready: bool = False
    ) -> None:
        """Wait until every server gives a model requests.

        Args:
          operation: that waits.
          name: of the model.
          is_ready: whether its workers must be there for each of them.

        Raises:
          Failed: one refuses it, or they do not say so in time.
        """
        controller = self._controller
        self._tell(operation, f"{name}: servers read its tokenizer")
        with trio.move_on_after(self._config.servers_s):
            while True:
                for server, refused in controller.refusals.items():
                    if name in refused:
                        raise OperationFailed(f"{server.partition('/')[0]}: {refused[name]}")
                config, said = controller.models[name].config, controller.models[name].activity
                # No drop waits for a server that was silent for `silence_s`: it may still have an
                # earlier model of this name.
                version = config.digest or config.model_dir
                has_it = {
                    server
                    for server, one in said.items()
                    if one.version == version and (one.is_ready or not is_ready)
                }
                servers = controller.heard_at.keys()
                if servers and servers <= has_it:
                    return
                await trio.sleep(self._config.tick_s)
        raise OperationFailed(_late("the servers", self._config.servers_s) + "; their log says why")

    async def _drop_all(self, operation: Operation) -> None:
        """Drop a model: its requests end first, then its workers.

        Raises:
          CommandFailed: it is needed, or its workers could not be ended; servers have it again.
        """
        name = operation.model
        self._tell(operation, f"{name}: its requests finish")
        await ask(self._supervisor, ServeModelRequest(name, is_served=False))
        await self._wait_let_go(name)
        try:
            await self._end(operation, name)
        except CommandFailed:
            await ask(self._supervisor, ServeModelRequest(name, is_served=True))
            raise
        self._drop(name)

    async def _wait_let_go(self, name: str) -> None:
        """Wait until no server has a model; at most until they have cut off its requests."""
        with trio.move_on_after(self._config.server_drain_s + self._config.servers_s):
            while True:
                if not self._is_known_to_servers(name):
                    return
                await trio.sleep(self._config.tick_s)

    def _is_known_to_servers(self, name: str) -> bool:
        """Whether a server has requests of a model, may have some, or says why it does not take
        the model."""
        if trio.current_time() < self.met_at:
            return True
        model = self._controller.models.get(name)
        is_refused = any(name in refused for refused in self._controller.refusals.values())
        return is_refused or (model is not None and bool(model.activity))

    async def _take_back(self, operation: Operation) -> None:
        """Leave nothing of a model that could not be added.

        Raises:
          CommandFailed: something of it is left.
        """
        name = operation.model
        self._tell(operation, f"{name}: taken back")
        await self._persist(
            partial(ask, self._supervisor, ServeModelRequest(name, is_served=False))
        )
        await self._wait_let_go(name)
        await self._end(operation, name)
        self._drop(name)

    async def _end(self, operation: Operation, name: str) -> None:
        """End the workers of a model.

        Raises:
          CommandFailed: some are left.
        """
        request, tell = DropModelRequest(name), partial(self._tell, operation)
        await self._persist(partial(ask, self._supervisor, request, tell))

    async def _persist(self, work: Callable[[], Awaitable[object]]) -> None:
        """Ask the supervisor until it does something, or the time of an operation is over.

        Raises:
          CommandFailed: it does not.
        """
        give_up_at = trio.current_time() + self._config.operation_timeout_s
        while True:
            try:
                await work()
                return
            except CommandFailed:
                if trio.current_time() >= give_up_at:
                    raise
            await trio.sleep(RETRY_S)

    def _add(self, config: ControlledModelConfig, size_bytes: int) -> None:
        if config.name not in self._controller.models:
            now = trio.current_time()
            model = Model(config, ModelState.STAGED, size_bytes, now, now, now)
            self._controller.models[config.name] = model

    def _drop(self, name: str) -> None:
        self._changed_at = trio.current_time()
        model = self._controller.models.pop(name, None)
        if model is None:
            return
        for live in filter(None, (model.running, model.waiting)):
            live.status, live.progress = OperationStatus.FAILED, f"{name} was dropped"
            self._controller.changed[live.id] = live
        self._controller.load_times.forget(name)
        self._forget(name)

    def _tell(self, operation: Operation, text: str) -> None:
        if text != operation.progress:
            self._controller.note_progress(operation, text)


def _late(what: str, seconds: float) -> str:
    return f"{what} took longer than {seconds:g} s"
