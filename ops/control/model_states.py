"""The states of a model on this machine, and the only steps between them. Pure.

A model of a fleet is fetched before the fleet starts, so there is no state in between ABSENT and
STAGED. To wake and to load are one step: both start its workers, from the page cache or from disk.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from triolet.control_protocol import ModelState as S
from triolet.errors import LocalProtocolError


class Event(Enum):
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


TRANSITIONS: Final[dict[S, dict[Event, S]]] = {
    S.ABSENT: {Event.FOUND: S.STAGED},
    S.STAGED: {Event.LOAD: S.LOADING, Event.LOST: S.ABSENT},
    S.LOADING: {Event.READY: S.WARM, Event.END: S.DRAINING},
    S.WARM: {Event.MET: S.SERVING, Event.UNREADY: S.LOADING, Event.END: S.DRAINING},
    S.SERVING: {Event.UNREADY: S.LOADING, Event.END: S.DRAINING},
    S.SLEEPING: {Event.LOAD: S.LOADING, Event.END: S.DRAINING, Event.LOST: S.ABSENT},
    S.DRAINING: {Event.SLEPT: S.SLEEPING, Event.UNLOADED: S.STAGED, Event.STAYED: S.LOADING},
}

HOLDING: Final = frozenset({S.LOADING, S.WARM, S.SERVING, S.DRAINING})
"""States in which worker processes hold memory."""
RUNNING: Final = frozenset({S.WARM, S.SERVING})
"""States in which workers are ready."""
RESTING: Final = frozenset({S.STAGED, S.SLEEPING})
"""States from which a model can be loaded."""


def after(state: S, event: Event) -> S:
    """Return the state that an event leads to.

    Raises:
      LocalProtocolError: there is no such step.
    """
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise LocalProtocolError(f"a model that is {state} cannot meet {event.name}") from None
