"""Loads LoRA adapters into a model of a running fleet, and unloads them.

All steps are idempotent, so that an interrupted operation can start again.
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
    """Runs the adapter operations of one fleet.

    Args:
      config: timeouts.
      controller: the fleet's models and what servers report about them.
      supervisor: socket of the supervisor.
      tell: sets the progress of an operation.
      persist: repeats a request to the supervisor until it succeeds or times out.
      are_met: returns whether every running server has reported its adapters.
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
        """Load an adapter. On failure, remove it everywhere.

        Raises:
          OperationFailed: it was not loaded.
          CommandFailed: it was not loaded.
        """
        order, name = _order(operation), operation.model
        was_there = order.name in self._model(name).config.adapters
        timeout_s = self._config.operation_timeout_s
        try:
            with trio.fail_after(timeout_s):
                # The supervisor checks the path again: it may have changed since the admin check.
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
        """Unload an adapter: let its requests finish, then restart the workers without it.

        Raises:
          OperationFailed: the model was dropped.
          CommandFailed: workers do not start without it; requests may use it again.
        """
        order = _order(operation)
        self._tell(operation, f"{operation.subject}: its requests finish")
        await self._end(operation, order.name)

    def note(self, config: ControlledModelConfig) -> None:
        """Record the adapters of a model.

        Raises:
          OperationFailed: the model was dropped.
        """
        model = self._model(config.name)
        more_bytes = config.adapter_bytes - model.config.adapter_bytes
        model.size_bytes = max(0, model.size_bytes + more_bytes)
        model.config = config

    async def _take_back(self, operation: Operation, adapter: str) -> None:
        """Remove an adapter that could not be loaded.

        Raises:
          CommandFailed: parts of it are left.
        """
        self._tell(operation, f"{operation.subject}: removing it again")
        # Repeat both steps: after a failed removal, requests may use the adapter again.
        await self._persist(partial(self._end, operation, adapter))

    async def _end(self, operation: Operation, adapter: str) -> None:
        """Stop accepting requests for an adapter, then remove it from the workers.

        Raises:
          OperationFailed: the model was dropped.
          CommandFailed: it was not removed; requests may use it again.
        """
        name, tell = operation.model, partial(self._tell, operation)
        await ask(self._supervisor, WithdrawAdapterRequest(name, adapter))
        await self._wait_let_go(name, adapter)
        request = DropAdapterRequest(name, adapter)
        self.note(await ask_config(self._supervisor, request, tell))

    async def _wait_named(self, operation: Operation, digest: str) -> None:
        """Wait until every server accepts requests for an adapter.

        Raises:
          OperationFailed: a server does not report it in time.
        """
        self._tell(operation, f"{operation.subject}: waiting for the servers")
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
            f"servers did not accept {operation.subject} within "
            f"{self._config.servers_s:g} s (control.servers_s); their log says why"
        )

    async def _wait_let_go(self, name: str, adapter: str) -> None:
        """Wait until no server has a withdrawn adapter or servers have cut off its requests."""
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
          OperationFailed: it was dropped.
        """
        model = self._controller.models.get(name)
        if model is None:
            raise OperationFailed(f"the model {name} was dropped from this fleet")
        return model


def _have_only(model: Model, digests: Collection[str]) -> bool:
    """Return whether servers have no adapters of a model except these."""
    return all(digest in digests for said in model.activity.values() for digest in said.adapters)


def _order(operation: Operation) -> AdapterOrder:
    """Decode the adapter of an operation.

    Raises:
      OperationFailed: the settings are invalid.
    """
    try:
        return msgspec.json.decode(operation.settings, type=AdapterOrder)
    except msgspec.DecodeError as error:
        raise OperationFailed(
            f"the settings of {operation.subject} cannot be read: {error}"
        ) from error
