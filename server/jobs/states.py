"""The states of a batch, in the API's words, and the steps that lead from one to the next.

The table is the whole truth: a step that it does not have raises and changes nothing. Knows no
database and no time.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from triolet.errors import LocalProtocolError


class BatchState(StrEnum):
    """Where a batch is."""

    VALIDATING = "validating"  # its file was not looked at yet
    FAILED = "failed"  # its file cannot be run
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"  # every line has its answer, good or bad
    EXPIRED = "expired"  # its window is over; what is not done is an error
    CANCELLING = "cancelling"  # lines under way still end
    CANCELLED = "cancelled"


class BatchStep(StrEnum):
    """What moves it."""

    REFUSE = "refuse"
    BEGIN = "begin"
    COMPLETE = "complete"
    EXPIRE = "expire"
    CANCEL = "cancel"
    STOP = "stop"  # a cancel is done


_S, _E = BatchState, BatchStep

TRANSITIONS: Final[dict[BatchState, dict[BatchStep, BatchState]]] = {
    _S.VALIDATING: {
        _E.REFUSE: _S.FAILED,
        _E.BEGIN: _S.IN_PROGRESS,
        _E.EXPIRE: _S.EXPIRED,
        _E.CANCEL: _S.CANCELLING,
    },
    _S.IN_PROGRESS: {
        _E.COMPLETE: _S.COMPLETED,
        _E.EXPIRE: _S.EXPIRED,
        _E.CANCEL: _S.CANCELLING,
    },
    _S.CANCELLING: {_E.CANCEL: _S.CANCELLING, _E.STOP: _S.CANCELLED},
    _S.FAILED: {},
    _S.COMPLETED: {},
    _S.EXPIRED: {},
    _S.CANCELLED: {},
}
OPEN: Final = tuple(state for state, steps in TRANSITIONS.items() if steps)
"""States of batches that have not ended."""


def after(state: BatchState, step: BatchStep) -> BatchState:
    """Return the state that `step` leads to.

    Raises:
      LocalProtocolError: there is no such step from here.
    """
    try:
        return TRANSITIONS[state][step]
    except KeyError:
        raise LocalProtocolError(f"{step.value} is no step from {state.value}") from None
