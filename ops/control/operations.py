"""Operations on models (load, sleep, add, switch, …): their kinds, status and errors."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import asdict

from triolet.config import SEPARATOR
from triolet.errors import TrioletError

if TYPE_CHECKING:
    from collections.abc import Iterable


class WantedState(StrEnum):
    """The kind of an operation."""

    LOAD = "load"
    """Start the workers."""
    SLEEP = "sleep"
    """Stop the workers; keep the files in the page cache, so that the model wakes quickly."""
    UNLOAD = "unload"
    """Stop the workers and drop the files from the page cache."""
    ADD = "add"
    """Add the model to the fleet; servers accept requests for it."""
    DROP = "drop"
    """Remove the model from the fleet."""
    SWITCH = "switch"
    """Give the public name to another version and remove the old one."""
    ROLLOUT = "rollout"
    """Move the public name to another version in steps (`rollouts`). Not in the journal of
    operations."""
    LOAD_ADAPTER = "load_adapter"
    """Load an adapter; servers accept requests for it."""
    UNLOAD_ADAPTER = "unload_adapter"
    """Remove an adapter."""


class OperationStatus(StrEnum):
    """The status of an operation."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


OF_ADAPTERS: Final = frozenset({WantedState.LOAD_ADAPTER, WantedState.UNLOAD_ADAPTER})
CHANGES: Final = frozenset({WantedState.ADD, WantedState.DROP, WantedState.SWITCH}) | OF_ADAPTERS
"""Operations that change which models and adapters a fleet has."""
DONE_WORDS: Final = {
    WantedState.ADD: "added",
    WantedState.DROP: "dropped",
    WantedState.SWITCH: "switched",
    WantedState.LOAD_ADAPTER: "loaded",
    WantedState.UNLOAD_ADAPTER: "unloaded",
}
ENDED: Final = frozenset({OperationStatus.DONE, OperationStatus.FAILED})


class AdapterOrder(msgspec.Struct, frozen=True):
    """Settings of an operation on an adapter.

    Attributes:
      name: name of the adapter, without the model's name.
      ref: directory or version of the adapter; empty to unload it.
    """

    name: str
    ref: str = ""


class SwitchOrder(msgspec.Struct, frozen=True):
    """Settings of a switch.

    Attributes:
      public_name: model name that clients use.
      replaced: name of the current version.
      ref: directory, file or version of the new one.
      revision: revision of the route when the order was given, if there is no supervisor.
    """

    public_name: str
    replaced: str
    ref: str
    revision: int = 0


class Operation(msgspec.Struct):
    """One operation on one model.

    Attributes:
      id: random id.
      model: name of the model; for a switch, of the new version.
      wanted: kind of operation.
      actor: `user:NAME` or `port:NUMBER` for the admin routes, `request` for a waiting request,
        `keep-alive`, `memory` for an eviction, `failed load`, or `supervisor` if workers ended
        without an operation.
      created_at: seconds since the epoch.
      status: current status.
      progress: current activity or outcome, as text.
      settings: JSON of an added model, an `AdapterOrder` or a `SwitchOrder`.
      run: id of the supervisor's run, for operations in CHANGES; else empty.
    """

    id: str
    model: str
    wanted: WantedState
    actor: str
    created_at: float
    status: OperationStatus = OperationStatus.WAITING
    progress: str = "accepted"
    settings: str = ""
    run: str = ""

    @property
    def shown(self) -> dict[str, Any]:
        """Fields for responses and the log: all but the settings, which contain paths and may have
        64 KiB."""
        return {name: value for name, value in asdict(self).items() if name != "settings"}

    @property
    def subject(self) -> str:
        """The public name of the model or adapter that changes."""
        if self.switch is not None:
            return self.switch.public_name
        if self.wanted not in OF_ADAPTERS:
            return self.model
        order = msgspec.json.decode(self.settings, type=AdapterOrder)
        return f"{self.model}{SEPARATOR}{order.name}"

    @property
    def switch(self) -> SwitchOrder | None:
        """The settings of a switch or rollout; None for other operations."""
        if self.wanted not in (WantedState.SWITCH, WantedState.ROLLOUT):
            return None
        return msgspec.json.decode(self.settings, type=SwitchOrder)

    @property
    def names(self) -> tuple[str, ...]:
        """Models that no other operation may change before its end."""
        return (self.model,) if self.switch is None else (self.model, self.switch.replaced)

    @property
    def is_over(self) -> bool:
        """Whether it is done or failed."""
        return self.status in ENDED


class UnknownModel(TrioletError):
    """A model that the fleet does not have."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"no model is called {name!r}; this fleet has {', '.join(known)}")


class UnknownRollout(TrioletError):
    """A model that has had no rollout."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name!r} has had no rollout; `triolet rollout status` lists those of all models"
        )


class UnknownAdapter(TrioletError):
    """An adapter that a model does not have."""

    def __init__(self, model: str, adapter: str, known: Iterable[str]) -> None:
        names = ", ".join(known) or "none"
        super().__init__(f"{model} has no adapter {adapter!r}; it has {names}")


class OperationFailed(Exception):
    """An operation failed; the text says why."""


class Conflict(TrioletError):
    """An operation that cannot start now, or not on this model; the text says why."""


class NoRoom(TrioletError):
    """A load that can never get enough memory; the text has the figures and the remedy."""
