"""LoRA adapters that are loaded into a model while its fleet runs, and unloaded.

Each step may be done again, as those of models that are added and dropped.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec
import trio

from ..exit_codes import CommandFailed
from ..supervisor.supervisor_socket import (
    DropAdapterRequest,
    LoadAdapterRequest,
    WithdrawAdapterRequest,
    ask,
    ask_config,
)
from .auditing import is_of_port
from .operations import AdapterOrder, Operation, OperationFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection
    from pathlib import Path

    from triolet.config import ControlConfig, ControlledModelConfig

    from .controller import Controller
    from .models import Model


class AdapterChanges:
    """The changes of one fleet's adapters.

    Args:
      config: bounds.
      controller: knows the models, and what servers say of them.
      supervisor: socket of what has the workers, and tells servers.
      tell: notes how far an operation is.
      persist: asks the supervisor until it does something.
      are_met: whether every server that runs has said which adapters it has.
    """

    def __init__(
        self,
        config: ControlConfig,
        controller: Controller,
        supervisor: Path,
        tell: Callable[[Operation, str], None],
        persist: Callable[[Callable[[], Awaitable[object]]], Awaitable[None]],
        are_met: Callable[[], bool],
    ) -> None:
        self._config = config
        self._controller = controller
        self._supervisor = supervisor
        self._tell = tell
        self._persist = persist
        self._are_met = are_met

    async def load(self, operation: Operation) -> None:
        """Load an adapter, or leave nothing of it.

        Raises:
          Failed: it was not loaded.
          CommandFailed: the same.
        """
        order, name = _order(operation), operation.model
        was_there = order.name in self._model(name).config.adapters
        timeout_s = self._config.operation_timeout_s
        try:
            with trio.fail_after(timeout_s):
                # What is on disk may change after the admin routes have looked at it.
                request = LoadAdapterRequest(name, order.name, order.ref, is_of_port(operation))
                config = await ask_config(self._supervisor, request, partial(self._tell, operation))
            self.note(config)
            await self._wait_named(operation, config.adapters[order.name])
            return
        except trio.TooSlowError:
            failure: Exception = OperationFailed(
                f"the workers of {name} took longer than {timeout_s:g} s "
                "(control.operation_timeout_s)"
            )
        except (OperationFailed, CommandFailed) as error:
            failure = error
        if not was_there:
            await self._take_back(operation, order.name)
        raise failure

    async def unload(self, operation: Operation) -> None:
        """Unload an adapter: its requests end first, then the workers start without it.

        Raises:
          Failed: servers do not let it go.
          CommandFailed: workers do not start without it; requests may name it again.
        """
        order = _order(operation)
        self._tell(operation, f"{operation.subject}: its requests finish")
        await self._end(operation, order.name)

    def note(self, config: ControlledModelConfig) -> None:
        """Take in which adapters a model has.

        Raises:
          Failed: it was dropped.
        """
        model = self._model(config.name)
        more_bytes = config.adapter_bytes - model.config.adapter_bytes
        model.size_bytes = max(0, model.size_bytes + more_bytes)
        model.config = config

    async def _take_back(self, operation: Operation, adapter: str) -> None:
        """Leave nothing of an adapter that could not be loaded.

        Raises:
          CommandFailed: something of it is left.
        """
        self._tell(operation, f"{operation.subject}: taken back")
        # Each time from the beginning: what workers did not let go may be named again.
        await self._persist(partial(self._end, operation, adapter))

    async def _end(self, operation: Operation, adapter: str) -> None:
        """Let requests name an adapter no more, then end it in the workers.

        Raises:
          Failed: the model was dropped.
          CommandFailed: it was not done; requests may name it again.
        """
        name, tell = operation.model, partial(self._tell, operation)
        await ask(self._supervisor, WithdrawAdapterRequest(name, adapter))
        await self._wait_let_go(name, adapter)
        request = DropAdapterRequest(name, adapter)
        self.note(await ask_config(self._supervisor, request, tell))

    async def _wait_named(self, operation: Operation, digest: str) -> None:
        """Wait until every server lets requests name an adapter.

        Raises:
          Failed: they do not say so in time.
        """
        self._tell(operation, f"{operation.subject}: servers take its name")
        with trio.move_on_after(self._config.servers_s):
            while True:
                servers = self._controller.heard_at.keys()
                said = self._model(operation.model).activity
                if servers and all(
                    name in said and digest in said[name].adapters for name in servers
                ):
                    return
                await trio.sleep(self._config.tick_s)
        raise OperationFailed(
            f"servers did not take the name {operation.subject} within "
            f"{self._config.servers_s:g} s (control.servers_s); their log says why"
        )

    async def _wait_let_go(self, name: str, adapter: str) -> None:
        """Wait until no server has an adapter that was withdrawn; at most until they have cut off
        its requests."""
        model = self._model(name)
        left = {digest for one, digest in model.config.adapters.items() if one != adapter}
        with trio.move_on_after(self._config.server_drain_s + self._config.servers_s):
            while True:
                if self._are_met() and _have_only(model, left):
                    return
                await trio.sleep(self._config.tick_s)

    def _model(self, name: str) -> Model:
        """Return a model.

        Raises:
          Failed: it was dropped.
        """
        model = self._controller.models.get(name)
        if model is None:
            raise OperationFailed(f"this fleet does not have the model {name} any more")
        return model


def _have_only(model: Model, digests: Collection[str]) -> bool:
    """Return whether no server has other adapters of a model."""
    return all(digest in digests for said in model.activity.values() for digest in said.adapters)


def _order(operation: Operation) -> AdapterOrder:
    """Return which adapter an operation is of.

    Raises:
      Failed: it does not say.
    """
    try:
        return msgspec.json.decode(operation.settings, type=AdapterOrder)
    except msgspec.DecodeError as error:
        raise OperationFailed(
            f"the settings of {operation.subject} cannot be read: {error}"
        ) from error
