"""Commands to the supervisor of a local fleet: lines of JSON over a Unix socket that only this
user can reach.
"""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import structlog
import trio

from triolet.config import (  # noqa: TC001 (msgspec reads the annotations)
    ControlledModelConfig,
    FleetModelConfig,
)
from triolet.config.routes import Route  # noqa: TC001 (msgspec reads the annotations)
from triolet.errors import ConfigError
from triolet.ids import Role  # noqa: TC001 (msgspec reads the annotations)

from ..exit_codes import CommandFailed
from .model_status import ModelStatus  # noqa: TC001 (msgspec reads the annotations)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from pathlib import Path

log = structlog.get_logger(__name__)

MAX_LINE_BYTES: Final = 1024 * 1024
"""Of one line: 64 models with paths and workers, or one with many aliases and adapters."""
REQUEST_TIMEOUT_S: Final = 5.0
"""For a command to say what it wants once it is connected."""
LIST_TIMEOUT_S: Final = 5.0
"""For a supervisor to list its models, which it has in memory."""
ANSWER_TIMEOUT_S: Final = 1.0
"""For a command to take a line of the answer; one that is stopped misses it."""


class RestartRequest(msgspec.Struct, frozen=True, tag_field="request", tag="restart"):
    """Restart every process of these roles, one after the other.

    Attributes:
      roles: which; none for all.
      models: of which the workers are restarted, and nothing else; none for all processes.
    """

    roles: tuple[Role, ...]
    models: tuple[str, ...] = ()


class StartModelRequest(msgspec.Struct, frozen=True, tag_field="request", tag="start_model"):
    """Start the workers of a model. Idempotent."""

    model: str


class StopModelRequest(msgspec.Struct, frozen=True, tag_field="request", tag="stop_model"):
    """Let the workers of a model drain and leave. Idempotent."""

    model: str


class ScaleRequest(msgspec.Struct, frozen=True, tag_field="request", tag="scale"):
    """Have so many workers of a model and role. Idempotent."""

    model: str
    role: Role
    count: int


class AddModelRequest(msgspec.Struct, frozen=True, tag_field="request", tag="add_model"):
    """Have a model more, which no server is told of yet. Idempotent.

    Attributes:
      name: of it.
      model: as settings would have it.
      is_reference_only: it and its adapters are versions of the store, no paths.
    """

    name: str
    model: FleetModelConfig
    is_reference_only: bool = False


class AddVersionRequest(msgspec.Struct, frozen=True, tag_field="request", tag="add_version"):
    """Have another version of a model beside it, with the same settings. No server is told of it
    yet. Where it computes alike, it replaces the other version at once, and its workers stay.
    Idempotent.

    Attributes:
      name: of the new version, where it gets workers of its own.
      replaced: name of the version that it is to replace.
      ref: its directory, file or version in the store.
      is_reference_only: it is a version of the store, no path.
    """

    name: str
    replaced: str
    ref: str
    is_reference_only: bool = False


class RouteRequest(msgspec.Struct, frozen=True, tag_field="request", tag="route"):
    """Put a version under the public name of another one. Idempotent.

    Attributes:
      version: that comes.
      replaced: that has the public name now.
      revision: of the route that the caller saw; 0 where there was none.
      is_moved: all new requests go to the version that comes. Otherwise it gets none yet.
    """

    version: str
    replaced: str
    revision: int
    is_moved: bool


class ServeModelRequest(msgspec.Struct, frozen=True, tag_field="request", tag="serve_model"):
    """Tell servers to have a model, or to let it go. Idempotent."""

    model: str
    is_served: bool


class DropModelRequest(msgspec.Struct, frozen=True, tag_field="request", tag="drop_model"):
    """End the workers of a model that servers have let go, and have it no more. Idempotent."""

    model: str


class LoadAdapterRequest(msgspec.Struct, frozen=True, tag_field="request", tag="load_adapter"):
    """Have a LoRA adapter of a model that requests may name. Idempotent.

    Attributes:
      model: of which.
      adapter: its name.
      ref: its directory or version.
      is_reference_only: it is a version of the store, no path.
    """

    model: str
    adapter: str
    ref: str
    is_reference_only: bool = False


class WithdrawAdapterRequest(
    msgspec.Struct, frozen=True, tag_field="request", tag="withdraw_adapter"
):
    """Let requests name an adapter of a model no more. Idempotent."""

    model: str
    adapter: str


class DropAdapterRequest(msgspec.Struct, frozen=True, tag_field="request", tag="drop_adapter"):
    """End an adapter in the workers of a model, which no request names. Idempotent."""

    model: str
    adapter: str


class ModelsRequest(msgspec.Struct, frozen=True, tag_field="request", tag="models"):
    """Tell how each model is."""


Request: TypeAlias = (
    RestartRequest
    | StartModelRequest
    | StopModelRequest
    | ScaleRequest
    | AddModelRequest
    | AddVersionRequest
    | RouteRequest
    | ServeModelRequest
    | DropModelRequest
    | LoadAdapterRequest
    | WithdrawAdapterRequest
    | DropAdapterRequest
    | ModelsRequest
)


class StepBegan(msgspec.Struct, frozen=True, tag_field="event", tag="step"):
    """What is done now, in words."""

    text: str


class OrderFinished(msgspec.Struct, frozen=True, tag_field="event", tag="finished"):
    """All of it is done."""


class OrderRefused(msgspec.Struct, frozen=True, tag_field="event", tag="refused"):
    """It was not done, or not to its end."""

    message: str


class ModelsAnswer(msgspec.Struct, frozen=True, tag_field="event", tag="models"):
    """How each model is.

    Attributes:
      models: each.
      run: of the supervisor, by an id of its own.
      configs: what control is to know of those with names.
      served: names of those that servers are told to have.
      routes: of which servers are told, by public name.
    """

    models: list[ModelStatus]
    run: str = ""
    configs: list[ControlledModelConfig] = []
    served: list[str] = []
    routes: dict[str, Route] = {}


class Added(msgspec.Struct, frozen=True, tag_field="event", tag="added"):
    """A model with workers that can be started is there, or its adapters have changed."""

    config: ControlledModelConfig


End: TypeAlias = OrderFinished | ModelsAnswer | Added
Answer: TypeAlias = StepBegan | OrderRefused | End
Tell: TypeAlias = "Callable[[Answer], Awaitable[None]]"
Command: TypeAlias = "Callable[[Request, Tell], Awaitable[None]]"
"""Does what a request asks for, and tells its steps and its end."""

_REQUESTS: Final[msgspec.json.Decoder[Request]] = msgspec.json.Decoder(Request)
_ANSWERS: Final[msgspec.json.Decoder[Answer]] = msgspec.json.Decoder(Answer)


async def answer_commands(
    path: Path,
    command: Command,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Take requests until cancelled. What one has begun goes on when its command leaves."""
    listening = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    await listening.bind(str(path))
    listening.listen(8)
    task_status.started()
    await trio.serve_listeners(partial(_serve_one, command), [trio.SocketListener(listening)])


async def ask(
    path: Path, request: Request, tell: Callable[[str], object] = lambda text: None
) -> End:
    """Have a supervisor do something, and return the end of its answer.

    Args:
      path: of its socket.
      request: what it is to do.
      tell: called with each step, in words.

    Raises:
      CommandFailed: the supervisor is gone or breaks off, or the order was not done completely.
    """
    gone = f"the supervisor behind {path} is gone; its log says why"
    try:
        async with (
            await trio.open_unix_socket(str(path)) as stream,
            aclosing(_lines(stream)) as lines,
        ):
            await stream.send_all(msgspec.json.encode(request) + b"\n")
            async for line in lines:
                match _ANSWERS.decode(line):
                    case StepBegan(text):
                        tell(text)
                    case OrderRefused(message):
                        raise CommandFailed(message)
                    case end:
                        return end
    except (OSError, trio.BrokenResourceError) as error:
        raise CommandFailed(f"{gone} ({error})") from error
    except msgspec.MsgspecError as error:
        raise CommandFailed(f"the answer of {path} cannot be understood: {error}") from error
    raise CommandFailed(gone)


async def ask_config(
    path: Path, request: Request, tell: Callable[[str], object]
) -> ControlledModelConfig:
    """Have a supervisor add a model or change its adapters, and return what the model is now.

    Args:
      path: of its socket.
      request: what it is to do.
      tell: called with each step, in words.

    Raises:
      CommandFailed: it was not done, or the supervisor does not say what the model is.
    """
    end = await ask(path, request, tell)
    if not isinstance(end, Added):
        raise CommandFailed("the supervisor does not say what the model is now")
    return end.config


async def ask_models(path: Path) -> ModelsAnswer:
    """Return how each model of a supervisor is.

    Raises:
      CommandFailed: it does not say.
    """
    with trio.move_on_after(LIST_TIMEOUT_S):
        end = await ask(path, ModelsRequest())
        if isinstance(end, ModelsAnswer):
            return end
    raise CommandFailed(
        f"the supervisor behind {path} does not say within {LIST_TIMEOUT_S:g} s which models it "
        "has; its log says why"
    )


async def _serve_one(command: Command, stream: trio.SocketStream) -> None:
    async def tell(answer: Answer) -> None:
        try:
            with trio.move_on_after(ANSWER_TIMEOUT_S):
                await stream.send_all(msgspec.json.encode(answer) + b"\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            log.debug("command_gone")

    async with stream:
        try:
            request = await _request(stream)
        except (
            msgspec.MsgspecError,
            ConfigError,
            UnicodeDecodeError,
            trio.TooSlowError,
            trio.BrokenResourceError,
        ) as error:
            await tell(OrderRefused(f"this supervisor does not understand the request: {error}"))
        else:
            await command(request, tell)


async def _request(stream: trio.SocketStream) -> Request:
    with trio.fail_after(REQUEST_TIMEOUT_S):
        async with aclosing(_lines(stream)) as lines:
            async for line in lines:
                return _REQUESTS.decode(line)
    raise msgspec.DecodeError("it ends before its first line does")


async def _lines(stream: trio.SocketStream) -> AsyncGenerator[bytes, None]:
    """Yield whole lines; a longer one than is allowed ends them."""
    unfinished = b""
    while len(unfinished) <= MAX_LINE_BYTES:
        data = await stream.receive_some(MAX_LINE_BYTES)
        if not data:
            return
        *lines, unfinished = (unfinished + data).split(b"\n")
        for line in lines:
            yield line
