"""What the database tells of files, batches and lines. Plain; knows no SQL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .states import BatchState


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
