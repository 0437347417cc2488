"""The phases of a sequence in the server, and the steps that lead from one to the next.

The table is the whole truth: a step that it does not have raises and changes nothing. Knows no
frames, no workers and no time.

A sequence may go round: whatever happens to a worker leads back to QUEUED and from there through a
new attempt. END leads from everywhere to FINISHED, once.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from triolet.errors import LocalProtocolError


class Phase(Enum):
    """Where a sequence is."""

    QUEUED = auto()  # waits for workers with room
    RESERVING = auto()  # decode was asked for a lease
    PREFILLING = auto()  # decode granted it; prefill, or decode itself, computes the prompt
    DECODING = auto()  # tokens arrive
    FINISHING = auto()  # decode is done, some of its tokens are still under way
    FINISHED = auto()  # one terminal event was given out


class Step(Enum):
    """What moves it."""

    DISPATCH = auto()
    GRANT = auto()
    TOKEN = auto()
    COMPLETE = auto()  # decode says how many tokens there are
    RETRY = auto()  # this attempt is over, the sequence is not
    END = auto()  # any terminal: finished, failed, cancelled


TRANSITIONS: Final[dict[Phase, dict[Step, Phase]]] = {
    Phase.QUEUED: {
        Step.DISPATCH: Phase.RESERVING,
        Step.END: Phase.FINISHED,
    },
    Phase.RESERVING: {
        Step.GRANT: Phase.PREFILLING,
        Step.RETRY: Phase.QUEUED,
        Step.END: Phase.FINISHED,
    },
    Phase.PREFILLING: {
        Step.TOKEN: Phase.DECODING,
        Step.COMPLETE: Phase.FINISHING,
        Step.RETRY: Phase.QUEUED,
        Step.END: Phase.FINISHED,
    },
    Phase.DECODING: {
        Step.TOKEN: Phase.DECODING,
        Step.COMPLETE: Phase.FINISHING,
        Step.RETRY: Phase.QUEUED,
        Step.END: Phase.FINISHED,
    },
    Phase.FINISHING: {
        Step.TOKEN: Phase.FINISHING,
        Step.RETRY: Phase.QUEUED,
        Step.END: Phase.FINISHED,
    },
    Phase.FINISHED: {},
}


def after(phase: Phase, step: Step) -> Phase:
    """Return the phase that `step` leads to.

    Raises:
      LocalProtocolError: there is no such step from here.
    """
    try:
        return TRANSITIONS[phase][step]
    except KeyError:
        raise LocalProtocolError(f"{step.name} is not a step from {phase.name}") from None
