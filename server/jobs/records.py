"""Records of files, batches and lines; the state table of batches; parsing of input lines and
encoding of output lines. Pure.

A step that is not in the state table raises and changes nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from triolet.errors import LocalProtocolError, RequestError

from ..api.json_body import parse_object

T = TypeVar("T")


class BatchState(StrEnum):
    """The state of a batch."""

    VALIDATING = "validating"  # its file has not been checked yet
    FAILED = "failed"  # its file cannot be run
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"  # every line has a result or an error
    EXPIRED = "expired"  # its window ended; lines without a result are errors
    CANCELLING = "cancelling"  # running lines may still finish
    CANCELLED = "cancelled"


class BatchStep(StrEnum):
    """An event that changes the state of a batch."""

    REFUSE = "refuse"
    BEGIN = "begin"
    COMPLETE = "complete"
    EXPIRE = "expire"
    CANCEL = "cancel"
    STOP = "stop"  # cancelling has finished


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
      LocalProtocolError: the table has no such step.
    """
    try:
        return TRANSITIONS[state][step]
    except KeyError:
        raise LocalProtocolError(f"{step.value} is not a valid step from {state.value}") from None


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file without its content. Field names are the API's."""

    id: str
    created_at: int
    filename: str
    purpose: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Line counts of a batch."""

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
    """A line without a result.

    Attributes:
      batch_id: the batch it belongs to.
      number: its position.
      custom_id: the client's id for it.
      endpoint: the path of its request.
      body: the request.
      owner: the tenant; empty without tenants.
      expires_at: when the batch's window ends, in seconds since 1970.
    """

    batch_id: str
    number: int
    custom_id: str
    endpoint: str
    body: bytes
    owner: str
    expires_at: int


class Page(NamedTuple, Generic[T]):
    """A page of files or batches, newest first."""

    items: list[T]
    has_more: bool


MAX_CUSTOM_ID: Final = 512
MAX_ERRORS: Final = 100
"""Maximum number of errors reported per file; the rest of the file is not checked."""


class Line(NamedTuple):
    """A request of a batch.

    Attributes:
      custom_id: the client's id for it, unique in the batch.
      body: the request, as JSON.
    """

    custom_id: str
    body: bytes


class BatchLineError(NamedTuple):
    """An error in an input file.

    Attributes:
      code: machine-readable code.
      message: text for people.
      line: line number from 1; None for the whole file.
    """

    code: str
    message: str
    line: int | None = None


class CheckedFile(NamedTuple):
    """A parsed input file.

    Attributes:
      lines: its requests.
      errors: why it cannot be run; empty if it can.
    """

    lines: list[Line]
    errors: list[BatchLineError]


def check_file(content: bytes, endpoint: str, max_lines: int) -> CheckedFile:
    """Parse a batch's input file.

    Args:
      content: one JSON object per line; empty lines are skipped.
      endpoint: the path that every line must name.
      max_lines: maximum number of lines.
    """
    lines: list[Line] = []
    errors: list[BatchLineError] = []
    seen: set[str] = set()
    for number, text in enumerate(content.split(b"\n"), 1):
        if not text.strip():
            continue
        if len(lines) >= max_lines:
            errors.append(
                BatchLineError("too_many_lines", f"a batch has at most {max_lines} lines")
            )
            break
        line = _line(text, endpoint, number)
        if isinstance(line, Line) and line.custom_id in seen:
            line = BatchLineError("duplicate_custom_id", "another line has this custom_id", number)
        if isinstance(line, BatchLineError):
            errors.append(line)
            if len(errors) >= MAX_ERRORS:
                break
            continue
        seen.add(line.custom_id)
        lines.append(line)
    if not lines and not errors:
        errors.append(BatchLineError("empty_file", "the file contains no requests"))
    return CheckedFile(lines, errors)


def answer_line(
    line_id: str, custom_id: str, status: int, request_id: str, body: bytes, version: str = ""
) -> bytes:
    """Return the output line of an answered request.

    Args:
      line_id: id of the output line.
      custom_id: the client's id for the request.
      status: HTTP status.
      request_id: the request's id in the log.
      body: the response body.
      version: digest of the model that answered; empty for a model that is not in a store.
    """
    try:
        shown: object = msgspec.Raw(body) if json.loads(body) is not None else None
    except ValueError:
        shown = body.decode("utf-8", "replace")
    response = {"status_code": status, "request_id": request_id, "body": shown}
    if version:
        response["model_version"] = version
    return _encoded(line_id, custom_id, response, None)


def error_line(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return the output line of a request that has no response."""
    return _encoded(line_id, custom_id, None, {"code": code, "message": message})


def _encoded(line_id: str, custom_id: str, response: object, error: object) -> bytes:
    document = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(document) + b"\n"


def _line(text: bytes, endpoint: str, number: int) -> Line | BatchLineError:
    """Return a line's request, or its error."""
    try:
        fields: dict[str, Any] = parse_object(text)
    except RequestError as error:
        return BatchLineError("invalid_json_line", error.message, number)
    custom_id, body = fields.get("custom_id"), fields.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        return BatchLineError(
            "invalid_custom_id", f"custom_id must be 1 to {MAX_CUSTOM_ID} characters", number
        )
    if fields.get("method") != "POST":
        return BatchLineError("invalid_method", "method must be POST", number)
    if fields.get("url") != endpoint:
        return BatchLineError(
            "invalid_url", f"url must be {endpoint}, the batch's endpoint", number
        )
    if not isinstance(body, dict):
        return BatchLineError("invalid_body", "body must be an object", number)
    if body.get("stream"):
        return BatchLineError("invalid_body", "stream must be false in a batch", number)
    return Line(custom_id, msgspec.json.encode(body))
