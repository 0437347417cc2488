"""Handlers of /v1/files and /v1/batches."""

from __future__ import annotations

import re
import secrets
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NoReturn

from quart import Response, request

from triolet.errors import draining

from ..api.body import INLINE_BYTES, read_body, read_fields
from ..api.errors import echo, http_error
from ..api.generate import json_response
from ..api.limits import check_may_batch
from ..tenants.tenancy import current_tenant
from ..text.process import at_once
from .forms import BatchFields, FileUpload, parse_upload, seconds_of_window
from .records import OPEN, BatchRecord, BatchState
from .storage import time_of_day

if TYPE_CHECKING:
    from triolet.errors import RequestError

    from ..api.services import Services
    from .records import FileRecord, Page
    from .storage import Storage


_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
PAUSED: Final = "batches_paused"
MAX_PAGE: Final = 100
DEFAULT_PAGE: Final = 20


def checked_id(text: str) -> str:
    """Return an id if it has a valid form.

    Raises:
      RequestError: 404; no id has this form.
    """
    if not _ID.fullmatch(text):
        raise missing(text)
    return text


def missing(text: str) -> RequestError:
    """Return the error for an unknown id."""
    return http_error(404, f"there is no file or batch with the id {echo(text)}")


def page_arguments() -> tuple[str | None, int]:
    """Return `after` and `limit` of the query.

    Raises:
      RequestError: 400; the limit is not a number in its range.
    """
    after = request.args.get("after")
    text = request.args.get("limit", str(DEFAULT_PAGE))
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) >= 1):
        raise http_error(400, "limit must be a whole number of at least 1", "limit")
    return (None if not after else checked_id(after)), min(int(text), MAX_PAGE)


def file_document(record: FileRecord) -> dict[str, Any]:
    """Return a file as the API's JSON object."""
    return {**asdict(record), "object": "file", "status": "processed"}


def batch_document(record: BatchRecord, paused: str | None = None) -> dict[str, Any]:
    """Return a batch as the API's JSON object.

    Args:
      record: the batch.
      paused: why this server starts no lines now; shown as an error of an open batch.
    """
    document = {**asdict(record), "object": "batch", "finalizing_at": record.completed_at}
    errors = record.errors
    if paused is not None and record.status in OPEN:
        errors = [{"code": PAUSED, "message": f"paused: {paused}", "param": None, "line": None}]
    if errors is not None:
        document["errors"] = {"object": "list", "data": errors}
    return document


def page_document(page: Page[Any], items: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a page as the API's JSON list."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": page.has_more,
    }


def keeps_no_files(services: Services, **_ids: str) -> NoReturn:
    """Refuse every request to files and batches with 404."""
    raise http_error(
        404, "files and batches are disabled on this server: start it with --batch-dir DIRECTORY"
    )


async def upload_file(storage: Storage, services: Services) -> Response:
    """Store a file."""
    if services.state.is_draining:
        raise draining()
    if request.mimetype != "multipart/form-data":
        raise http_error(
            415, "the body is not a form; send multipart/form-data, with the parts purpose and file"
        )
    options = dict(request.mimetype_params)
    body = await read_body(services.config)
    do = at_once if len(body) <= INLINE_BYTES else services.do
    upload = FileUpload(*await do(parse_upload, body, request.mimetype, options))
    purpose = upload.fields.get("purpose")
    if purpose != "batch":
        raise http_error(400, "purpose must be batch", "purpose")
    file_id = f"file-{secrets.token_hex(12)}"
    record = await storage.run(
        storage.files.add,
        current_tenant().name,
        file_id,
        upload.filename,
        purpose,
        upload.content,
        int(time_of_day()),
    )
    return json_response(file_document(record))


async def list_files(storage: Storage, services: Services) -> Response:
    """List files, newest first."""
    after, limit = page_arguments()
    page = await storage.run(
        storage.files.page, current_tenant().name, after, limit, request.args.get("purpose")
    )
    items = [file_document(record) for record in page.items]
    return json_response(page_document(page, items))


async def show_file(storage: Storage, services: Services, file_id: str) -> Response:
    """Return one file, without its content."""
    return json_response(file_document(await _record(storage, file_id)))


async def delete_file(storage: Storage, services: Services, file_id: str) -> Response:
    """Delete a file."""
    if not await storage.run(storage.files.delete, current_tenant().name, checked_id(file_id)):
        raise missing(file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


async def file_content(storage: Storage, services: Services, file_id: str) -> Response:
    """Return the content of a file."""
    record = await _record(storage, file_id)
    return Response(FileParts(storage, record.id), content_type="application/octet-stream")


async def _record(storage: Storage, file_id: str) -> FileRecord:
    record = await storage.run(storage.files.get, current_tenant().name, checked_id(file_id))
    if record is None:
        raise missing(file_id)
    return record


class FileParts:
    """Reads a file's content from the database part by part while it is sent."""

    def __init__(self, storage: Storage, file_id: str) -> None:
        self._storage = storage
        self._file_id = file_id
        self._number = 0

    def __aiter__(self) -> FileParts:
        return self

    async def __anext__(self) -> bytes:
        storage = self._storage
        part = await storage.run(storage.files.content, self._file_id, self._number)
        if not part:
            raise StopAsyncIteration
        self._number += 1
        return part


async def create_batch(storage: Storage | None, services: Services) -> Response:
    """Create a batch. The runner checks its file later."""
    check_may_batch()
    if storage is None:
        keeps_no_files(services)
    fields = await read_fields(BatchFields, services)
    if services.state.is_draining:
        raise draining()
    now = int(time_of_day())
    record = BatchRecord(
        id=f"batch_{secrets.token_hex(12)}",
        status=BatchState.VALIDATING,
        endpoint=fields.endpoint,
        input_file_id=checked_id(fields.input_file_id),
        completion_window=fields.completion_window,
        created_at=now,
        expires_at=now + seconds_of_window(fields.completion_window),
        metadata=fields.metadata,
    )
    await storage.run(storage.batches.add, current_tenant().name, record)
    storage.changed.set()
    return json_response(batch_document(record, storage.paused))


async def list_batches(storage: Storage, services: Services) -> Response:
    """List batches, newest first."""
    page = await storage.run(storage.batches.page, current_tenant().name, *page_arguments())
    items = [batch_document(one, storage.paused) for one in page.items]
    return json_response(page_document(page, items))


async def show_batch(storage: Storage, services: Services, batch_id: str) -> Response:
    """Return one batch."""
    record = await storage.run(storage.batches.get, checked_id(batch_id), current_tenant().name)
    if record is None:
        raise missing(batch_id)
    return json_response(batch_document(record, storage.paused))


async def cancel_batch(storage: Storage, services: Services, batch_id: str) -> Response:
    """Cancel a batch; results of finished lines stay."""
    record = await storage.run(
        storage.batches.cancel, current_tenant().name, checked_id(batch_id), int(time_of_day())
    )
    if record is None:
        raise missing(batch_id)
    storage.changed.set()
    return json_response(batch_document(record, storage.paused))
