"""What servers and `triolet control` say to one another: lines of JSON over a Unix socket.

A server says what its models do, each second and at once when a request needs one that is not
there. Control tells the states of all models at once and after each change.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeAlias, TypeVar

import msgspec

MAX_LINE_BYTES: Final = 1024 * 1024
"""Of one line: a thousand models with names of 200 bytes, and six rows of versions of each."""


CONTROL_SOCKET: Final = "control.sock"
"""In the fleet's own folder: where servers reach control."""
ADMIN_SOCKET: Final = "admin.sock"
"""In the same folder: HTTP for commands."""


class ModelState(StrEnum):
    """How far a model is on the way to requests. Its files are there in every state but ABSENT."""

    ABSENT = "absent"
    """Its directory is gone."""
    STAGED = "staged"
    """On disk; nothing of it is in memory on purpose."""
    LOADING = "loading"
    """Its worker processes start."""
    WARM = "warm"
    """Its workers are ready; no server has met them yet."""
    SERVING = "serving"
    """Servers give requests to its workers."""
    SLEEPING = "sleeping"
    """Its workers have ended; its files stay in the page cache."""
    DRAINING = "draining"
    """Its workers finish what they run, and end."""


class ModelActivity(msgspec.Struct, frozen=True):
    """What a server does with one model.

    Attributes:
      name: of the model.
      in_flight: requests that run or wait.
      queued: those of them that wait.
      last_used_s_ago: since the last request came or ended; None if there was none.
      is_ready: whether requests could begin now: the server has met its workers.
      adapters: digests of the LoRA adapters that requests may name, and of those that some request
        still has.
      version: digest of the model, or its directory where that is in no store: a server may still
        have another model of this name.
    """

    name: str
    in_flight: int
    queued: int
    last_used_s_ago: float | None
    is_ready: bool
    adapters: tuple[str, ...] = ()
    version: str = ""


class Activity(msgspec.Struct, frozen=True, tag_field="say", tag="activity"):
    """What a server does with each of its models.

    Attributes:
      server: its name.
      models: each of them.
      refused: why models that it is to have cannot be added there, by name.
    """

    server: str
    models: tuple[ModelActivity, ...]
    refused: dict[str, str] = {}


class Wake(msgspec.Struct, frozen=True, tag_field="say", tag="wake"):
    """A request waits for a model that is not serving."""

    model: str


class ModelNews(msgspec.Struct, frozen=True):
    """The state of one model.

    Attributes:
      name: of the model.
      digest: of its version; empty where it is not in the store.
      state: now.
      predicted_ready_s: from now until it serves, if it were woken now; None where it cannot be.
      bytes: memory that its workers take, or would.
      worker_seconds: how long worker processes of each of its versions have run together, by
        digest; those of versions long gone as one row.
    """

    name: str
    digest: str
    state: ModelState
    predicted_ready_s: float | None
    bytes: int
    worker_seconds: dict[str, float] = {}


class Models(msgspec.Struct, frozen=True, tag_field="tell", tag="models"):
    """The states of all models."""

    models: tuple[ModelNews, ...]


Said: TypeAlias = Activity | Wake
T = TypeVar("T")

_SAID: Final[msgspec.json.Decoder[Said]] = msgspec.json.Decoder(Said)
_TOLD: Final = msgspec.json.Decoder(Models)


def _decoded(decoder: msgspec.json.Decoder[T], line: bytes) -> T:
    try:
        return decoder.decode(line)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error


def encode_line(message: Said | Models) -> bytes:
    """Return a message as one line."""
    return msgspec.json.encode(message) + b"\n"


def decode_said(line: bytes) -> Said:
    """Return what a server says.

    Raises:
      msgspec.MsgspecError: it is nothing of the kind.
    """
    return _decoded(_SAID, line)


def decode_told(line: bytes) -> Models:
    """Return what control tells.

    Raises:
      msgspec.MsgspecError: it is nothing of the kind.
    """
    return _decoded(_TOLD, line)


class LineBuffer:
    """Cuts a stream of bytes into lines."""

    def __init__(self) -> None:
        self._unfinished = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are whole now.

        Raises:
          msgspec.DecodeError: a line is longer than any message.
        """
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if len(self._unfinished) > MAX_LINE_BYTES:
            raise msgspec.DecodeError(f"a line has more than {MAX_LINE_BYTES} bytes")
        return lines
