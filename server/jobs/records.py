"""The states of a batch, in the API's words, and the steps that lead from one to the next.

The table is the whole truth: a step that it does not have raises and changes nothing. Knows no
database and no time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

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


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file, without its content. Field names are the API's."""

    id: str
    created_at: int
    filename: str
    purpose: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch. Field names are the API's."""

    id: str
    status: BatchState
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    errors: list[dict[str, object]] | None = None
    in_progress_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    request_counts: Counts = field(default_factory=Counts)


class WaitingLine(NamedTuple):
    """A line that has no answer.

    Attributes:
      batch_id: whose.
      number: its place.
      custom_id: what its client calls it.
      endpoint: where it goes.
      body: the request.
      owner: the tenant; empty where there are no tenants.
      expires_at: when its batch's window ends, in seconds since 1970.
    """

    batch_id: str
    number: int
    custom_id: str
    endpoint: str
    body: bytes
    owner: str
    expires_at: int


class FilePage(NamedTuple):
    """Some files of many, newest first."""

    items: list[FileRecord]
    has_more: bool


class BatchPage(NamedTuple):
    """Some batches of many, newest first."""

    items: list[BatchRecord]
    has_more: bool
