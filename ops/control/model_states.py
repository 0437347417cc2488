"""State machine of a model on this machine: its states, events and transitions. No I/O.

Models are fetched before the fleet starts, so no state lies between ABSENT and STAGED. Waking and
loading are one transition: both start the workers, from the page cache or from disk.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from transport.control_protocol import ModelState as S
from triolet.errors import LocalProtocolError


class ModelEvent(Enum):
    """An event in the life of a model."""

    FOUND = auto()
    """Its files exist."""
    LOST = auto()
    """Its files are gone."""
    LOAD = auto()
    """Its workers are being started."""
    READY = auto()
    """Each worker is ready: it has checked its golden tokens and listens."""
    MET = auto()
    """Every server has connected to the workers."""
    UNREADY = auto()
    """No worker of one of its roles is ready; the supervisor restarts them."""
    END = auto()
    """Its workers are being stopped."""
    SLEPT = auto()
    """Its workers have ended; its files stay in the page cache."""
    UNLOADED = auto()
    """Its workers have ended; its files were dropped from the page cache."""
    STAYED = auto()
    """The supervisor could not stop the workers."""


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
    """Return the state after an event.

    Raises:
      LocalProtocolError: the table has no such transition.
    """
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise LocalProtocolError(f"a model in state {state} got event {event.name}") from None
