"""What control asks of the supervisor, over its Unix socket: lines of JSON."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import trio

from triolet.control_protocol import LineBuffer

from ..supervisor.supervisor_socket import Finished, Refused, StepBegan

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

READ_BYTES: Final = 64 * 1024
LIST_TIMEOUT_S: Final = 5.0
"""For the list of workers, which the supervisor has in memory."""


class StartModel(msgspec.Struct, frozen=True, tag_field="request", tag="start_model"):
    """Start the workers of a model, and wait until they are ready."""

    model: str


class StopModel(msgspec.Struct, frozen=True, tag_field="request", tag="stop_model"):
    """Let the workers of a model drain, and end them."""

    model: str


class ListModels(msgspec.Struct, frozen=True, tag_field="request", tag="models"):
    """Say which workers there are."""


class WorkerOfModel(msgspec.Struct, frozen=True):
    """A worker process.

    Attributes:
      name: of the process.
      role: prefill or decode.
      pid: None while it does not run.
      is_ready: whether it takes work.
    """

    name: str
    role: str
    pid: int | None
    is_ready: bool


class ModelWorkers(msgspec.Struct, frozen=True):
    """A model and its workers."""

    name: str
    workers: tuple[WorkerOfModel, ...]


class ModelList(msgspec.Struct, frozen=True, tag_field="event", tag="models"):
    """Every model with its workers."""

    models: tuple[ModelWorkers, ...]


Request: TypeAlias = StartModel | StopModel | ListModels
Answer: TypeAlias = StepBegan | Finished | Refused | ModelList

_ANSWERS: Final[msgspec.json.Decoder[Answer]] = msgspec.json.Decoder(Answer)


class SupervisorFailed(Exception):
    """The supervisor did not do it; the text says why."""


class SupervisorClient:
    """Asks one supervisor.

    Args:
      path: of its socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def do(self, request: StartModel | StopModel, tell: Callable[[str], object]) -> None:
        """Let it do something, to its end.

        Args:
          request: what.
          tell: called with each step, in words.

        Raises:
          SupervisorFailed: it was not done, or not to its end.
        """
        async with aclosing(self._ask(request)) as answers:
            async for answer in answers:
                match answer:
                    case StepBegan(text):
                        tell(text)
                    case Finished():
                        return
                    case Refused(message):
                        raise SupervisorFailed(message)
                    case ModelList():
                        raise SupervisorFailed("the supervisor answers another question")

    async def models(self) -> tuple[ModelWorkers, ...]:
        """Return every model with its workers.

        Raises:
          SupervisorFailed: it does not say.
        """
        with trio.move_on_after(LIST_TIMEOUT_S):
            async with aclosing(self._ask(ListModels())) as answers:
                async for answer in answers:
                    if isinstance(answer, ModelList):
                        return answer.models
                    raise SupervisorFailed(f"the supervisor does not list its models: {answer}")
        raise SupervisorFailed(f"the supervisor is silent for {LIST_TIMEOUT_S:g} s")

    async def _ask(self, request: Request) -> AsyncGenerator[Answer, None]:
        lines = LineBuffer()
        try:
            async with await trio.open_unix_socket(str(self._path)) as stream:
                await stream.send_all(msgspec.json.encode(request) + b"\n")
                while data := await stream.receive_some(READ_BYTES):
                    for line in lines.feed(data):
                        yield _ANSWERS.decode(line)
        except (OSError, trio.BrokenResourceError, msgspec.MsgspecError) as error:
            raise SupervisorFailed(f"the supervisor behind {self._path}: {error}") from error
        raise SupervisorFailed(f"the supervisor behind {self._path} ended its answer too early")
