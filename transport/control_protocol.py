"""Messages between servers and `triolet control`: JSON in SERVER_REPORT and CONTROL_NEWS frames.

A server reports the activity of its models every second, and at once when a request needs a model
that is not loaded. Control sends the states of all models, the routes of a fleet on several hosts,
and rollouts (`rollout_protocol`) twice a second and after each change.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeAlias, TypeVar

import msgspec

from triolet.config.routes import Route  # noqa: TC001 (msgspec reads the annotations)
from triolet.units import KIB

from .rollout_protocol import (
    CandidateReport,
    FinishedRequest,
    RolloutView,
    SeenIncident,
    WorkDone,
)

MAX_MESSAGE_BYTES: Final = 1024 * KIB
"""Bytes of one message: a thousand models with names of 200 bytes and six versions each."""
MAX_FRAME_BYTES: Final = MAX_MESSAGE_BYTES + KIB
"""Bytes of its frame."""
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
      work: work of its workers since they started.
    """

    name: str
    in_flight: int
    queued: int
    last_used_s_ago: float | None
    is_ready: bool
    adapters: tuple[str, ...] = ()
    version: str = ""
    work: WorkDone = WorkDone()


class Activity(msgspec.Struct, frozen=True, tag_field="say", tag="activity"):
    """A server's activity with all its models.

    Attributes:
      server: its name.
      models: all of them.
      refused: reasons by name of models that this server could not add.
      routes: its routes by public name.
      fence: highest fence of a control that it has heard.
      zone: its zone; empty without zones.
      freezes: why no rollout should go on, such as a lost zone or a spent error budget.
      candidates: what it knows about the candidates of rollouts, by version.
    """

    server: str
    models: tuple[ModelActivity, ...]
    refused: dict[str, str] = {}
    routes: dict[str, Route] = {}
    fence: int = 0
    zone: str = ""
    freezes: tuple[str, ...] = ()
    candidates: dict[str, CandidateReport] = {}


class Observed(msgspec.Struct, frozen=True, tag_field="say", tag="observed"):
    """What a server saw of models with a rollout since its last message.

    Attributes:
      server: its name.
      requests: ended requests.
      incidents: incidents of workers.
    """

    server: str
    requests: tuple[FinishedRequest, ...]
    incidents: tuple[SeenIncident, ...] = ()


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
    """The states of all models, and routes: those of a fleet on several hosts, and those of
    rollouts, which expire unless they are renewed.

    Attributes:
      models: the states.
      routes: routes by public name. A temporary route that is missing here is withdrawn.
      fence: rises with each process; servers ignore a lower one than they have heard. 0 from the
        control of `triolet serve`, which is always the only one.
      rollouts: rollouts that run, and those that ended lately.
    """

    models: tuple[ModelNews, ...]
    routes: dict[str, Route] = {}
    fence: int = 0
    rollouts: tuple[RolloutView, ...] = ()


Said: TypeAlias = Activity | Observed | Wake
T = TypeVar("T")

_SAID: Final[msgspec.json.Decoder[Said]] = msgspec.json.Decoder(Said)
_TOLD: Final = msgspec.json.Decoder(Models)


def _decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error


def encoded(message: Said | Models) -> bytes:
    """Return a message as JSON."""
    return msgspec.json.encode(message)


def decode_said(body: bytes) -> Said:
    """Parse a message of a server.

    Raises:
      msgspec.MsgspecError: it is not a valid message.
    """
    return _decoded(_SAID, body)


def decode_told(body: bytes) -> Models:
    """Parse a message of control.

    Raises:
      msgspec.MsgspecError: it is not a valid message.
    """
    return _decoded(_TOLD, body)
