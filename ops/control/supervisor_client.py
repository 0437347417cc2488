"""What control asks of the supervisor, over its Unix socket."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from ..exit_codes import CommandFailed
from ..supervisor.supervisor_socket import (
    Added,
    AddModelRequest,
    DropAdapterRequest,
    DropModelRequest,
    Finished,
    LoadAdapterRequest,
    Models,
    ModelsRequest,
    Refused,
    ServeModelRequest,
    StartModelRequest,
    StepBegan,
    StopModelRequest,
    WithdrawAdapterRequest,
    ask,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from triolet.config import ControlledModelConfig, ModelConfig

    from ..supervisor.supervisor_socket import Request
    from .operations import AdapterOrder

LIST_TIMEOUT_S: Final = 5.0
"""For the list of workers, which the supervisor has in memory."""


class SupervisorFailed(Exception):
    """The supervisor did not do it; the text says why."""


class SupervisorClient:
    """Asks one supervisor.

    Args:
      path: of its socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def start_model(self, name: str, tell: Callable[[str], object]) -> None:
        """Start the workers of a model, and wait until they are ready.

        Args:
          name: of the model.
          tell: called with each step, in words.

        Raises:
          SupervisorFailed: it was not done, or not to its end.
        """
        await self._do(StartModelRequest(name), tell)

    async def stop_model(self, name: str, tell: Callable[[str], object]) -> None:
        """Let the workers of a model drain, and wait until they are gone.

        Args:
          name: of the model.
          tell: called with each step, in words.

        Raises:
          SupervisorFailed: it was not done, or not to its end.
        """
        await self._do(StopModelRequest(name), tell)

    async def add_model(
        self,
        name: str,
        model: ModelConfig,
        tell: Callable[[str], object],
        *,
        is_reference_only: bool,
    ) -> ControlledModelConfig:
        """Have a model more, whose workers can be started; no server is told of it.

        Args:
          name: of the model.
          model: as settings would have it.
          tell: called with each step, in words.
          is_reference_only: it and its adapters are versions of the store, no paths.

        Raises:
          SupervisorFailed: it cannot be had; nothing of it stays.
        """
        return _required(await self._do(AddModelRequest(name, model, is_reference_only), tell))

    async def serve_model(self, name: str, *, is_served: bool) -> None:
        """Have servers told to have a model, or to let it go.

        Raises:
          SupervisorFailed: they were not told.
        """
        await self._do(ServeModelRequest(name, is_served), lambda text: None)

    async def drop_model(self, name: str, tell: Callable[[str], object]) -> None:
        """End the workers of a model that servers have let go, and have it no more.

        Args:
          name: of the model.
          tell: called with each step, in words.

        Raises:
          SupervisorFailed: it was not done, or not to its end.
        """
        await self._do(DropModelRequest(name), tell)

    async def load_adapter(
        self,
        model: str,
        order: AdapterOrder,
        tell: Callable[[str], object],
        *,
        is_reference_only: bool,
    ) -> ControlledModelConfig:
        """Have an adapter in the workers of a model, and servers told that requests may name it.

        Args:
          model: of which.
          order: its name and directory or version.
          tell: called with each step, in words.
          is_reference_only: it is a version of the store, no path.

        Raises:
          SupervisorFailed: it cannot be had; what may stay of it `drop_adapter` ends.
        """
        request = LoadAdapterRequest(model, order.name, order.ref, is_reference_only)
        return _required(await self._do(request, tell))

    async def withdraw_adapter(self, model: str, name: str) -> None:
        """Have servers told that requests may name an adapter no more.

        Raises:
          SupervisorFailed: they were not told.
        """
        await self._do(WithdrawAdapterRequest(model, name), lambda text: None)

    async def drop_adapter(
        self, model: str, name: str, tell: Callable[[str], object]
    ) -> ControlledModelConfig:
        """End an adapter that no request names.

        Args:
          model: of which.
          name: of the adapter.
          tell: called with each step, in words.

        Raises:
          SupervisorFailed: it was not done; requests may name it again, or servers were not told.
        """
        return _required(await self._do(DropAdapterRequest(model, name), tell))

    async def models(self) -> Models:
        """Return how each model is.

        Raises:
          SupervisorFailed: the supervisor does not say.
        """
        with trio.move_on_after(LIST_TIMEOUT_S):
            try:
                async with aclosing(ask(self._path, ModelsRequest())) as answers:
                    async for answer in answers:
                        if isinstance(answer, Models):
                            return answer
                        why = answer.message if isinstance(answer, Refused) else "another answer"
                        raise SupervisorFailed(f"the supervisor does not list models: {why}")
            except (CommandFailed, msgspec.MsgspecError) as error:
                raise SupervisorFailed(str(error)) from error
        raise SupervisorFailed(
            f"the supervisor behind {self._path} is silent for {LIST_TIMEOUT_S:g} s"
        )

    async def _do(
        self, request: Request, tell: Callable[[str], object]
    ) -> ControlledModelConfig | None:
        """Ask for something, and return what was added, if anything was."""
        try:
            async with aclosing(ask(self._path, request)) as answers:
                async for answer in answers:
                    match answer:
                        case StepBegan(text):
                            tell(text)
                        case Refused(message):
                            raise SupervisorFailed(message)
                        case Finished():
                            return None
                        case Added(config):
                            return config
        except (CommandFailed, msgspec.MsgspecError) as error:
            raise SupervisorFailed(str(error)) from error
        raise SupervisorFailed(f"the supervisor behind {self._path} ended its answer too early")


def _required(config: ControlledModelConfig | None) -> ControlledModelConfig:
    if config is None:
        raise SupervisorFailed("the supervisor does not say what the model is now")
    return config
