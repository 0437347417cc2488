"""Messages between servers and `triolet control`: lines of JSON over a Unix socket.

A server reports the activity of its models every second, and at once when a request needs a model
that is not loaded. Control sends the states of all models on connecting and after each change.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeAlias, TypeVar

import msgspec

MAX_LINE_BYTES: Final = 1024 * 1024
"""Bytes of one line: a thousand models with names of 200 bytes and six versions each."""


CONTROL_SOCKET: Final = "control.sock"
"""In the fleet's own folder: the socket for servers."""
ADMIN_SOCKET: Final = "admin.sock"
"""In the same folder: the HTTP socket for commands."""


class ModelState(StrEnum):
    """State of a model. Its files are on disk in every state except ABSENT."""

    ABSENT = "absent"
    """Its directory is gone."""
    STAGED = "staged"
    """On disk, not loaded."""
    LOADING = "loading"
    """Its worker processes are starting."""
    WARM = "warm"
    """Its workers are ready, but no server has met them yet."""
    SERVING = "serving"
    """Servers send requests to its workers."""
    SLEEPING = "sleeping"
    """Its workers have ended; its files stay in the page cache."""
    DRAINING = "draining"
    """Its workers finish their requests, then end."""


class ModelActivity(msgspec.Struct, frozen=True):
    """A server's activity with one model.

    Attributes:
      name: name of the model.
      in_flight: requests that run or wait.
      queued: those of them that wait.
      last_used_s_ago: since the last request arrived or ended; None if there was none.
      is_ready: whether requests could begin now: the server has met its workers.
      adapters: digests of the LoRA adapters that requests may name or still use.
      version: digest of the model, or its directory outside the store: a server may still have
        another model of this name.
    """

    name: str
    in_flight: int
    queued: int
    last_used_s_ago: float | None
    is_ready: bool
    adapters: tuple[str, ...] = ()
    version: str = ""


class Activity(msgspec.Struct, frozen=True, tag_field="say", tag="activity"):
    """A server's activity with all its models.

    Attributes:
      server: its name.
      models: all of them.
      refused: reasons by name of models that this server could not add.
    """

    server: str
    models: tuple[ModelActivity, ...]
    refused: dict[str, str] = {}


class Wake(msgspec.Struct, frozen=True, tag_field="say", tag="wake"):
    """A request waits for a model that has no workers."""

    model: str


class ModelNews(msgspec.Struct, frozen=True):
    """The state of one model.

    Attributes:
      name: name of the model.
      digest: digest of its version; empty for a model outside the store.
      state: present state.
      predicted_ready_s: time until it serves if woken now; None if it cannot be woken.
      bytes: memory that its workers take or would take.
      worker_seconds: total running time of the worker processes of each version, by digest; old
        versions share one row.
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
    """Parse a message of a server.

    Raises:
      msgspec.MsgspecError: it is not a valid message.
    """
    return _decoded(_SAID, line)


def decode_told(line: bytes) -> Models:
    """Parse a message of control.

    Raises:
      msgspec.MsgspecError: it is not a valid message.
    """
    return _decoded(_TOLD, line)


class LineBuffer:
    """Splits a stream of bytes into lines."""

    def __init__(self) -> None:
        self._unfinished = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are now complete.

        Raises:
          msgspec.DecodeError: a line exceeds MAX_LINE_BYTES.
        """
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if len(self._unfinished) > MAX_LINE_BYTES:
            raise msgspec.DecodeError(f"a line has more than {MAX_LINE_BYTES} bytes")
        return lines
