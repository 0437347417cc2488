"""The states of a model on this machine, and the only steps between them. Pure.

A model of a fleet is fetched before the fleet starts, so there is no state in between ABSENT and
STAGED. To wake and to load are one step: both start its workers, from the page cache or from disk.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from triolet.control_protocol import ModelState as S
from triolet.errors import LocalProtocolError


class ModelEvent(Enum):
    """What happens to a model."""

    FOUND = auto()
    """Its files are there."""
    LOST = auto()
    """Its files are gone."""
    LOAD = auto()
    """Its workers are told to start."""
    READY = auto()
    """Each of its workers is ready: it has computed its golden tokens and listens."""
    MET = auto()
    """Every server has met them."""
    UNREADY = auto()
    """No worker of one of its roles is ready any more; the supervisor starts them again."""
    END = auto()
    """Its workers are told to end."""
    SLEPT = auto()
    """They have ended, and its files stay in the page cache."""
    UNLOADED = auto()
    """They have ended, and the page cache was told to forget its files."""
    STAYED = auto()
    """The supervisor could not end them."""


TRANSITIONS: Final[dict[S, dict[ModelEvent, S]]] = {
    S.ABSENT: {ModelEvent.FOUND: S.STAGED},
    S.STAGED: {ModelEvent.LOAD: S.LOADING, ModelEvent.LOST: S.ABSENT},
    S.LOADING: {ModelEvent.READY: S.WARM, ModelEvent.END: S.DRAINING},
    S.WARM: {ModelEvent.MET: S.SERVING, ModelEvent.UNREADY: S.LOADING, ModelEvent.END: S.DRAINING},
    S.SERVING: {ModelEvent.UNREADY: S.LOADING, ModelEvent.END: S.DRAINING},
    S.SLEEPING: {ModelEvent.LOAD: S.LOADING, ModelEvent.END: S.DRAINING, ModelEvent.LOST: S.ABSENT},
    S.DRAINING: {
        ModelEvent.SLEPT: S.SLEEPING,
        ModelEvent.UNLOADED: S.STAGED,
        ModelEvent.STAYED: S.LOADING,
    },
}

HOLDING: Final = frozenset({S.LOADING, S.WARM, S.SERVING, S.DRAINING})
"""States in which worker processes hold memory."""
RUNNING: Final = frozenset({S.WARM, S.SERVING})
"""States in which workers are ready."""
RESTING: Final = frozenset({S.STAGED, S.SLEEPING})
"""States from which a model can be loaded."""


def after(state: S, event: ModelEvent) -> S:
    """Return the state that an event leads to.

    Raises:
      LocalProtocolError: there is no such step.
    """
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise LocalProtocolError(f"a model that is {state} cannot meet {event.name}") from None
