"""One uploaded file out of a multipart form. Knows werkzeug's parser; knows no endpoint."""

from __future__ import annotations

import secrets
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Final, NamedTuple

from quart import Response, request
from werkzeug.exceptions import HTTPException
from werkzeug.formparser import FormDataParser

from triolet.errors import draining

from ..api.body import INLINE_BYTES, in_parser_thread, read_body
from ..api.errors import http_error
from ..api.generate import json_response
from .storage import time_of_day
from .stored import (
    checked_id,
    file_document,
    missing,
    owner_of_request,
    page_arguments,
    page_document,
)

if TYPE_CHECKING:
    from ..api.services import Services
    from .records import FileRecord
    from .storage import Storage


MAX_PARTS: Final = 16
PIECE_BYTES: Final = 64 * 1024
"""That werkzeug reads at once."""
MAX_FIELD_BYTES: Final = 2 * PIECE_BYTES
"""Of plain fields; also bounds what the parser holds of a file at a time, a piece and what may be
the beginning of its end."""


class Upload(NamedTuple):
    """What came.

    Attributes:
      fields: plain ones, by name.
      filename: of the file, as its client calls it.
      content: of the file.
    """

    fields: dict[str, str]
    filename: str
    content: bytes


def parse_upload(body: bytes, mimetype: str, options: dict[str, str]) -> Upload:
    """Return the file named `file` and the fields beside it.

    Raises:
      RequestError: 400; it is no such form.
    """
    parser = FormDataParser(
        stream_factory=_in_memory,
        max_form_memory_size=MAX_FIELD_BYTES,
        max_form_parts=MAX_PARTS,
        silent=False,
    )
    try:
        _, fields, files = parser.parse(BytesIO(body), mimetype, len(body), options)
    except (ValueError, HTTPException) as error:
        raise http_error(400, f"the body is not a multipart form: {str(error)[:200]}") from None
    found = files.get("file")
    if found is None:
        raise http_error(400, "file is required, with a filename", "file")
    names = {str(name): str(value) for name, value in fields.items()}
    return Upload(names, str(found.filename or "")[:256], found.stream.read())


def _in_memory(
    total_content_length: int | None,
    content_type: str | None,
    filename: str | None,
    content_length: int | None = None,
) -> BytesIO:
    """Return where a part goes. The body as a whole is bounded already."""
    del total_content_length, content_type, filename, content_length
    return BytesIO()


PURPOSES: Final = ("batch",)


def keeps_no_files(services: Services, **_ids: str) -> Response:
    """Refuse every request about files and batches: 404."""
    raise http_error(404, "this server keeps no files: start it with --batch-dir DIRECTORY")


async def upload_file(storage: Storage, services: Services) -> Response:
    """Keep a file."""
    if services.state.is_draining:
        raise draining()
    if request.mimetype != "multipart/form-data":
        raise http_error(415, "send multipart/form-data, with the parts purpose and file")
    options = dict(request.mimetype_params)
    body = await read_body(services.config)
    parse = partial(parse_upload, body, request.mimetype, options)
    upload = await in_parser_thread(parse, services, is_quick=len(body) <= INLINE_BYTES)
    purpose = upload.fields.get("purpose")
    if purpose not in PURPOSES:
        raise http_error(400, "purpose must be batch", "purpose")
    file_id = f"file-{secrets.token_hex(12)}"
    record = await storage.run(
        storage.files.add,
        owner_of_request(),
        file_id,
        upload.filename,
        purpose,
        upload.content,
        int(time_of_day()),
    )
    return json_response(file_document(record))


async def list_files(storage: Storage, services: Services) -> Response:
    """Return files, newest first."""
    after, limit = page_arguments()
    page = await storage.run(
        storage.files.page, owner_of_request(), after, limit, request.args.get("purpose")
    )
    items = [file_document(record) for record in page.items]
    return json_response(page_document(page, items))


async def show_file(storage: Storage, services: Services, file_id: str) -> Response:
    """Return one file, without its content."""
    return json_response(file_document(await _record(storage, file_id)))


async def delete_file(storage: Storage, services: Services, file_id: str) -> Response:
    """Forget a file."""
    if not await storage.run(storage.files.delete, owner_of_request(), checked_id(file_id)):
        raise missing(file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


async def file_content(storage: Storage, services: Services, file_id: str) -> Response:
    """Return what is in a file."""
    record = await _record(storage, file_id)
    return Response(FileParts(storage, record.id), content_type="application/octet-stream")


async def _record(storage: Storage, file_id: str) -> FileRecord:
    record = await storage.run(storage.files.get, owner_of_request(), checked_id(file_id))
    if record is None:
        raise missing(file_id)
    return record


class FileParts:
    """The content of a file, read as it is sent. It holds nothing between two parts."""

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
