"""What is asked of a model, and how far it is."""

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
    """The state that an operation leads to."""

    LOAD = "load"
    """Its workers run."""
    SLEEP = "sleep"
    """They have ended; the files stay in the page cache, so that it wakes quickly."""
    UNLOAD = "unload"
    """They have ended, and the page cache is free for others."""
    ADD = "add"
    """The fleet has the model, and servers give it requests."""
    DROP = "drop"
    """The fleet has the model no more."""
    SWITCH = "switch"
    """Another version has its public name, and the fleet has it no more."""
    LOAD_ADAPTER = "load_adapter"
    """Requests may name an adapter of it."""
    UNLOAD_ADAPTER = "unload_adapter"
    """It has the adapter no more."""


class OperationStatus(StrEnum):
    """How far an operation is."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


OF_ADAPTERS: Final = frozenset({WantedState.LOAD_ADAPTER, WantedState.UNLOAD_ADAPTER})
CHANGES: Final = frozenset({WantedState.ADD, WantedState.DROP, WantedState.SWITCH}) | OF_ADAPTERS
"""What changes which models and adapters a fleet has."""
DONE_WORDS: Final = {
    WantedState.ADD: "added",
    WantedState.DROP: "dropped",
    WantedState.SWITCH: "switched",
    WantedState.LOAD_ADAPTER: "loaded",
    WantedState.UNLOAD_ADAPTER: "unloaded",
}
ENDED: Final = frozenset({OperationStatus.DONE, OperationStatus.FAILED})


class AdapterOrder(msgspec.Struct, frozen=True):
    """Which adapter an operation is of.

    Attributes:
      name: of it, without that of its model.
      ref: its directory or version; empty to unload it.
    """

    name: str
    ref: str = ""


class SwitchOrder(msgspec.Struct, frozen=True):
    """Which version is to replace another one.

    Attributes:
      public_name: under which clients ask for both.
      replaced: name of the version that answers now.
      ref: directory, file or version of the one that comes.
    """

    public_name: str
    replaced: str
    ref: str


class Operation(msgspec.Struct):
    """One operation on one model.

    Attributes:
      id: random.
      model: its name; of a switch, that of the version that comes.
      wanted: what it leads to.
      actor: `user:NAME` or `port:NUMBER` for the admin routes, `request` for a request that waits,
        `keep-alive`, `memory` for another model's, `failed load`, or `supervisor` where
        workers ended without an operation.
      created_at: seconds since the epoch.
      status: how far it is.
      progress: what is done now, or the outcome, in words.
      settings: of a model that is added, an `AdapterOrder`, or a `SwitchOrder`, as JSON.
      run: of the fleet whose models change, by its supervisor's id; empty for the other operations.
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
        """What answers and the log tell of it: not the settings, which have paths and are up to
        64 KiB."""
        return {name: value for name, value in asdict(self).items() if name != "settings"}

    @property
    def subject(self) -> str:
        """What changes: the model, as clients call it, or an adapter of it."""
        if self.switch is not None:
            return self.switch.public_name
        if self.wanted not in OF_ADAPTERS:
            return self.model
        order = msgspec.json.decode(self.settings, type=AdapterOrder)
        return f"{self.model}{SEPARATOR}{order.name}"

    @property
    def switch(self) -> SwitchOrder | None:
        """Which version it replaces; None for another operation."""
        if self.wanted is not WantedState.SWITCH:
            return None
        return msgspec.json.decode(self.settings, type=SwitchOrder)

    @property
    def names(self) -> tuple[str, ...]:
        """The models of which no other change may begin before its end."""
        return (self.model,) if self.switch is None else (self.model, self.switch.replaced)

    @property
    def is_over(self) -> bool:
        """Whether it is done or has failed."""
        return self.status in ENDED


class UnknownModel(TrioletError):
    """A model that the fleet does not have."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"there is no model {name!r}; this fleet has {', '.join(known)}")


class UnknownAdapter(TrioletError):
    """An adapter that a model does not have."""

    def __init__(self, model: str, adapter: str, known: Iterable[str]) -> None:
        names = ", ".join(known) or "none"
        super().__init__(f"{model} has no adapter {adapter!r}; it has {names}")


class OperationFailed(Exception):
    """A model or adapter cannot be had; the text says why."""


class Conflict(TrioletError):
    """An order that cannot be given now, or not for this model; the text says why."""


class NoRoom(TrioletError):
    """A load that cannot be; the text has the figures and the remedy."""
