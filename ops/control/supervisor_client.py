"""What control asks of the supervisor, over its Unix socket."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from ..exit_codes import CommandFailed
from ..supervisor.supervisor_socket import (
    Finished,
    Models,
    ModelsRequest,
    Refused,
    StartModelRequest,
    StepBegan,
    StopModelRequest,
    ask,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
                        raise SupervisorFailed(f"the supervisor does not list models: {answer}")
            except (CommandFailed, msgspec.MsgspecError) as error:
                raise SupervisorFailed(str(error)) from error
        raise SupervisorFailed(f"the supervisor is silent for {LIST_TIMEOUT_S:g} s")

    async def _do(
        self, request: StartModelRequest | StopModelRequest, tell: Callable[[str], object]
    ) -> None:
        try:
            async with aclosing(ask(self._path, request)) as answers:
                async for answer in answers:
                    match answer:
                        case StepBegan(text):
                            tell(text)
                        case Refused(message):
                            raise SupervisorFailed(message)
                        case Finished():
                            return
        except (CommandFailed, msgspec.MsgspecError) as error:
            raise SupervisorFailed(str(error)) from error
        raise SupervisorFailed(f"the supervisor behind {self._path} ended its answer too early")
