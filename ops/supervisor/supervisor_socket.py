"""Protocol, client and listener of the supervisor's command socket: JSON lines over a Unix socket
that only this user can reach.
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
"""Limit of one line: 64 models with paths and workers, or one with many aliases and adapters."""
REQUEST_TIMEOUT_S: Final = 5.0
"""Timeout of receiving a request after a client connects."""
LIST_TIMEOUT_S: Final = 5.0
"""Timeout of listing models, which the supervisor does from memory."""
ANSWER_TIMEOUT_S: Final = 1.0
"""Timeout of sending a line; a client that does not read misses it."""


class RestartRequest(msgspec.Struct, frozen=True, tag_field="request", tag="restart"):
    """Restart every process of some roles, one at a time.

    Attributes:
      roles: roles to restart; empty for all.
      models: restart only the workers of these models; empty for all processes.
    """

    roles: tuple[Role, ...]
    models: tuple[str, ...] = ()


class StartModelRequest(msgspec.Struct, frozen=True, tag_field="request", tag="start_model"):
    """Start the workers of a model. Idempotent."""

    model: str


class StopModelRequest(msgspec.Struct, frozen=True, tag_field="request", tag="stop_model"):
    """Drain and stop the workers of a model. Idempotent."""

    model: str


class ScaleRequest(msgspec.Struct, frozen=True, tag_field="request", tag="scale"):
    """Set the number of workers of a model and role. Idempotent."""

    model: str
    role: Role
    count: int


class AddModelRequest(msgspec.Struct, frozen=True, tag_field="request", tag="add_model"):
    """Add a model without notifying servers. Idempotent.

    Attributes:
      name: name of the model.
      model: its settings.
      is_reference_only: accept only versions in the store, not paths.
    """

    name: str
    model: FleetModelConfig
    is_reference_only: bool = False


class AddVersionRequest(msgspec.Struct, frozen=True, tag_field="request", tag="add_version"):
    """Add another version of a model with the same settings, without notifying servers. If both
    have the same compute digest, it replaces the old version at once and keeps its workers.
    Idempotent.

    Attributes:
      name: name of the new version, if it gets its own workers.
      replaced: name of the version to replace.
      ref: directory, file or stored version of the new one.
      is_reference_only: accept only a version in the store, not a path.
      is_beside: keep the old version also then; its workers serve both.
    """

    name: str
    replaced: str
    ref: str
    is_reference_only: bool = False
    is_beside: bool = False


class RouteRequest(msgspec.Struct, frozen=True, tag_field="request", tag="route"):
    """Route the public name of a version to another one. Idempotent.

    Attributes:
      version: name of the new version.
      replaced: name of the version that has the public name now.
      revision: revision of the route that the caller saw; 0 if it saw none.
      is_moved: route all new requests to the new version; otherwise it gets none yet. If both have
        the same workers, the replaced version gets the files of the new one instead.
    """

    version: str
    replaced: str
    revision: int
    is_moved: bool


class ServeModelRequest(msgspec.Struct, frozen=True, tag_field="request", tag="serve_model"):
    """Tell servers to serve a model, or to stop serving it. Idempotent."""

    model: str
    is_served: bool


class DropModelRequest(msgspec.Struct, frozen=True, tag_field="request", tag="drop_model"):
    """Remove a model that servers no longer serve, and stop its workers. Idempotent."""

    model: str


class LoadAdapterRequest(msgspec.Struct, frozen=True, tag_field="request", tag="load_adapter"):
    """Load a LoRA adapter into a model and accept requests for it. Idempotent.

    Attributes:
      model: name of the model.
      adapter: name of the adapter.
      ref: its directory or version.
      is_reference_only: accept only a version in the store, not a path.
    """

    model: str
    adapter: str
    ref: str
    is_reference_only: bool = False


class WithdrawAdapterRequest(
    msgspec.Struct, frozen=True, tag_field="request", tag="withdraw_adapter"
):
    """Stop accepting requests for an adapter. Idempotent."""

    model: str
    adapter: str


class DropAdapterRequest(msgspec.Struct, frozen=True, tag_field="request", tag="drop_adapter"):
    """Remove a withdrawn adapter from the workers of a model. Idempotent."""

    model: str
    adapter: str


class ModelsRequest(msgspec.Struct, frozen=True, tag_field="request", tag="models"):
    """Report the status of each model."""


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
    """Description of the current step."""

    text: str


class OrderFinished(msgspec.Struct, frozen=True, tag_field="event", tag="finished"):
    """The request succeeded."""


class OrderRefused(msgspec.Struct, frozen=True, tag_field="event", tag="refused"):
    """The request failed or was refused."""

    message: str


class ModelsAnswer(msgspec.Struct, frozen=True, tag_field="event", tag="models"):
    """Status of the models.

    Attributes:
      models: status of each model.
      run: id of the supervisor's run.
      configs: control's config of each named model.
      served: names of the models that servers are configured to serve.
      routes: current routes by public name.
    """

    models: list[ModelStatus]
    run: str = ""
    configs: list[ControlledModelConfig] = []
    served: list[str] = []
    routes: dict[str, Route] = {}


class Added(msgspec.Struct, frozen=True, tag_field="event", tag="added"):
    """A model was added, or its adapters have changed."""

    config: ControlledModelConfig


End: TypeAlias = OrderFinished | ModelsAnswer | Added
Answer: TypeAlias = StepBegan | OrderRefused | End
Tell: TypeAlias = "Callable[[Answer], Awaitable[None]]"
Command: TypeAlias = "Callable[[Request, Tell], Awaitable[None]]"
"""Executes a request, and reports its steps and result."""

_REQUESTS: Final[msgspec.json.Decoder[Request]] = msgspec.json.Decoder(Request)
_ANSWERS: Final[msgspec.json.Decoder[Answer]] = msgspec.json.Decoder(Answer)


async def answer_commands(
    path: Path,
    command: Command,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve requests until cancelled. A request continues if its client disconnects."""
    listening = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    await listening.bind(str(path))
    listening.listen(8)
    task_status.started()
    await trio.serve_listeners(partial(_serve_one, command), [trio.SocketListener(listening)])


async def ask(
    path: Path, request: Request, tell: Callable[[str], object] = lambda text: None
) -> End:
    """Send a request to a supervisor and return its final answer.

    Args:
      path: path of its socket.
      request: the request.
      tell: called with a description of each step.

    Raises:
      CommandFailed: the supervisor is gone, or the request failed or was refused.
    """
    gone = f"the supervisor at {path} is gone; its log says why"
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
        raise CommandFailed(
            f"the answer of {path} is invalid: {error}; check that the fleet has the same release "
            "of Triolet"
        ) from error
    raise CommandFailed(gone)


async def ask_config(
    path: Path, request: Request, tell: Callable[[str], object]
) -> ControlledModelConfig:
    """Send a request that adds or changes a model, and return the model's config.

    Args:
      path: path of the supervisor's socket.
      request: the request.
      tell: called with a description of each step.

    Raises:
      CommandFailed: the request failed, or the answer has no config.
    """
    end = await ask(path, request, tell)
    if not isinstance(end, Added):
        raise CommandFailed("the supervisor's answer has no config of the model")
    return end.config


async def ask_models(path: Path) -> ModelsAnswer:
    """Return the status of a supervisor's models.

    Raises:
      CommandFailed: the supervisor does not answer.
    """
    with trio.move_on_after(LIST_TIMEOUT_S):
        end = await ask(path, ModelsRequest())
        if isinstance(end, ModelsAnswer):
            return end
    raise CommandFailed(
        f"the supervisor at {path} did not list its models within {LIST_TIMEOUT_S:g} s; its log "
        "says why"
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
            await tell(OrderRefused(f"the request is invalid for this supervisor: {error}"))
        else:
            await command(request, tell)


async def _request(stream: trio.SocketStream) -> Request:
    with trio.fail_after(REQUEST_TIMEOUT_S):
        async with aclosing(_lines(stream)) as lines:
            async for line in lines:
                return _REQUESTS.decode(line)
    raise msgspec.DecodeError("it has no complete line")


async def _lines(stream: trio.SocketStream) -> AsyncGenerator[bytes, None]:
    """Yield complete lines. Stop at a line longer than MAX_LINE_BYTES."""
    unfinished = b""
    while len(unfinished) <= MAX_LINE_BYTES:
        data = await stream.receive_some(MAX_LINE_BYTES)
        if not data:
            return
        *lines, unfinished = (unfinished + data).split(b"\n")
        for line in lines:
            yield line
