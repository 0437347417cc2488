"""Idempotent steps shared by the operations that add, drop and switch models: requests to the
supervisor, and waits for the servers.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio

from transport.control_protocol import ModelState
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
from .models import Model, owner_of
from .operations import OperationFailed, OperationStatus, WantedState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from triolet.config import ControlConfig, ControlledModelConfig

    from .controller import Controller
    from .operations import Operation

log = structlog.get_logger(__name__)

BY_ADD: Final = "add"
RETRY_S: Final = 1.0 * SECONDS
"""Wait before repeating a request that the supervisor refused, for example during a restart."""
MEET_S: Final = 2.0 * SECONDS
"""Time in which every running server connects once control listens; they try every second."""


class ModelSteps:
    """The steps of operations that change which models a fleet has.

    Args:
      config: timeouts.
      controller: the fleet's models and the decisions about their workers.
      supervisor: socket of the supervisor.
      settle: called after each change, to decide, write the journal and notify servers.
      forget: removes a model from the journal.

    Attributes:
      met_at: time by which every running server has reported its models; inf before control
        listens.
      changed_at: time when a model was last dropped or an operation last ended.
    """

    def __init__(
        self,
        config: ControlConfig,
        controller: Controller,
        supervisor: Path,
        settle: Callable[[], None],
        forget: Callable[[str], None],
    ) -> None:
        self.met_at = math.inf
        self.changed_at = 0.0
        self._config = config
        self._controller = controller
        self._supervisor = supervisor
        self._settle = settle
        self._forget = forget

    def note_listening(self) -> None:
        """Record that control listens for servers from now on."""
        self.met_at = trio.current_time() + MEET_S

    async def ask_added(
        self, operation: Operation, request: AddModelRequest | AddVersionRequest
    ) -> ControlledModelConfig:
        """Add a model or a version at the supervisor.

        Raises:
          OperationFailed: it took too long and was rolled back.
          CommandFailed: the supervisor refused it.
        """
        limit_s = self._config.operation_timeout_s
        with trio.move_on_after(limit_s):
            return await ask_config(self._supervisor, request, partial(self.tell, operation))
        await self.take_back(operation)
        raise OperationFailed(_late("checking the model", limit_s))

    async def ask_route(self, request: RouteRequest) -> None:
        """Change a route at the supervisor.

        Raises:
          OperationFailed: the supervisor did not answer in time; it may still change the route.
          CommandFailed: the supervisor refused it.
        """
        limit_s = self._config.operation_timeout_s
        with trio.move_on_after(limit_s):
            await ask(self._supervisor, request)
            return
        raise OperationFailed(_late("changing the route", limit_s) + "; the fleet's log says why")

    async def load(self, operation: Operation) -> None:
        """Load a model that is being added, or the version that has its workers, and wait for it.

        Raises:
          OperationFailed: the load failed.
          NoRoom: there is no memory for it.
        """
        now = trio.current_time()
        owner = owner_of(self._controller.models, operation.model)
        load = self._controller.order(owner, WantedState.LOAD, BY_ADD, now, operation.created_at)
        self._settle()
        while not load.is_over:
            await trio.sleep(self._config.tick_s)
            self.tell(operation, load.progress)
        if load.status is OperationStatus.FAILED:
            raise OperationFailed(load.progress)

    async def wait_served(self, operation: Operation, name: str, *, is_ready: bool = False) -> None:
        """Wait until every server accepts requests for a model.

        Args:
          operation: operation that waits.
          name: name of the model.
          is_ready: also wait until each server has connected to its workers.

        Raises:
          OperationFailed: a server refuses the model or does not report it in time.
        """
        self.tell(operation, f"{name}: servers load its tokenizer")
        await self.wait_for_servers(partial(self._is_served, name, is_ready=is_ready))

    def _is_served(self, name: str, *, is_ready: bool) -> bool:
        """Return whether every server accepts requests for a model.

        Raises:
          OperationFailed: a server refuses it.
        """
        controller = self._controller
        for server, refused in controller.refusals.items():
            if name in refused:
                raise OperationFailed(f"{server.partition('/')[0]}: {refused[name]}")
        model, servers = controller.models.get(name), controller.heard_at.keys()
        if model is None or not servers or trio.current_time() < self.met_at:
            return False
        # Compare versions: a drop does not wait for silent servers, so a server may still
        # have an earlier model of this name.
        version = model.config.digest or model.config.model_dir
        has_it = {
            server
            for server, one in model.activity.items()
            if one.version == version and (one.is_ready or not is_ready)
        }
        return servers <= has_it

    async def wait_for_servers(self, is_done: Callable[[], bool]) -> None:
        """Wait until servers have carried out a step.

        Args:
          is_done: returns whether they have.

        Raises:
          OperationFailed: they have not in time.
        """
        with trio.move_on_after(self._config.servers_s):
            while not is_done():  # noqa: ASYNC110 (reports of several servers)
                await trio.sleep(self._config.tick_s)
            return
        raise OperationFailed(_late("the servers", self._config.servers_s) + "; their log says why")

    async def wait_let_go(self, name: str) -> None:
        """Wait until no server has a model, or until servers have cut off its requests."""
        with trio.move_on_after(self._config.server_drain_s + self._config.servers_s):
            while True:
                if not self._is_known_to_servers(name):
                    return
                await trio.sleep(self._config.tick_s)

    def _is_known_to_servers(self, name: str) -> bool:
        """Return whether a server has the model, may have it, or refuses it."""
        if trio.current_time() < self.met_at:
            return True
        model = self._controller.models.get(name)
        is_refused = any(name in refused for refused in self._controller.refusals.values())
        return is_refused or (model is not None and bool(model.activity))

    async def take_back(self, operation: Operation) -> None:
        """Remove a model that could not be added, unless its public name has no other version.

        Raises:
          CommandFailed: parts of it are left.
        """
        name = operation.model
        if operation.switch is not None:
            routes = (await ask_models(self._supervisor)).routes
            if any(one.stable == name for one in routes.values()):
                log.error("version_not_taken_back", model=name, reason="it has its public name")
                return
        self.tell(operation, f"{name}: removing it again")
        await self.persist(partial(ask, self._supervisor, ServeModelRequest(name, is_served=False)))
        await self.wait_let_go(name)
        await self.end(operation, name)
        self.drop(name)

    async def end(self, operation: Operation, name: str) -> None:
        """Stop the workers of a model.

        Raises:
          CommandFailed: some still run.
        """
        request, tell = DropModelRequest(name), partial(self.tell, operation)
        await self.persist(partial(ask, self._supervisor, request, tell))

    async def persist(self, work: Callable[[], Awaitable[object]]) -> None:
        """Repeat a request to the supervisor until it succeeds.

        Raises:
          CommandFailed: it still fails after `operation_timeout_s`.
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

    def add(
        self,
        config: ControlledModelConfig,
        size_bytes: int,
        state: ModelState = ModelState.STAGED,
    ) -> None:
        """Add a model that the supervisor or a server has."""
        if config.name not in self._controller.models:
            now = trio.current_time()
            model = Model(config, state, size_bytes, now, now, now)
            self._controller.models[config.name] = model

    def drop(self, name: str) -> None:
        """Forget a model that the supervisor has dropped."""
        self.changed_at = trio.current_time()
        model = self._controller.models.pop(name, None)
        if model is None:
            return
        for live in filter(None, (model.running, model.waiting)):
            live.status, live.progress = OperationStatus.FAILED, f"{name} was dropped"
            self._controller.changed[live.id] = live
        self._controller.load_times.forget(name)
        self._forget(name)

    def tell(self, operation: Operation, text: str) -> None:
        """Set the progress text of an operation."""
        if text != operation.progress:
            self._controller.note_progress(operation, text)


def _late(what: str, seconds: float) -> str:
    return f"{what} took longer than {seconds:g} s"
