"""What endpoints over stored things have in common: ids and pages."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from quart import request

from ..api.errors import echo, http_error
from ..tenants.tenancy import current_tenant
from .records import OPEN

if TYPE_CHECKING:
    from triolet.errors import RequestError

    from .records import BatchPage, BatchRecord, FilePage, FileRecord

_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
PAUSED: Final = "batches_paused"
MAX_PAGE: Final = 100
DEFAULT_PAGE: Final = 20


def owner_of_request() -> str:
    """Return whose things a request is about; empty where there are no tenants."""
    return current_tenant().name


def checked_id(text: str) -> str:
    """Return an id that is fit to be looked up.

    Raises:
      RequestError: 404; nothing can have it.
    """
    if not _ID.fullmatch(text):
        raise missing(text)
    return text


def missing(text: str) -> RequestError:
    """Return the error for an id that nothing has."""
    return http_error(404, f"there is nothing with the id {echo(text)}")


def page_arguments() -> tuple[str | None, int]:
    """Return `after` and `limit` of the query.

    Raises:
      RequestError: 400; the limit is no number in its range.
    """
    after = request.args.get("after")
    text = request.args.get("limit", str(DEFAULT_PAGE))
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) >= 1):
        raise http_error(400, "limit must be a number from 1 on", "limit")
    return (None if not after else checked_id(after)), min(int(text), MAX_PAGE)


def file_document(record: FileRecord) -> dict[str, Any]:
    """Return a file in the API's form."""
    return {**asdict(record), "object": "file", "status": "processed"}


def batch_document(record: BatchRecord, paused: str | None = None) -> dict[str, Any]:
    """Return a batch in the API's form.

    Args:
      record: of the batch.
      paused: why no line begins on this server now; shown as an error of a batch that is open.
    """
    document = {**asdict(record), "object": "batch", "finalizing_at": record.completed_at}
    errors = record.errors
    if paused is not None and record.status in OPEN:
        errors = [{"code": PAUSED, "message": f"paused: {paused}", "param": None, "line": None}]
    if errors is not None:
        document["errors"] = {"object": "list", "data": errors}
    return document


def page_document(page: FilePage | BatchPage, items: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a page in the API's form."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": page.has_more,
    }
