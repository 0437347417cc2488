"""One uploaded file out of a multipart form. Knows werkzeug's parser; knows no endpoint."""

from __future__ import annotations

from io import BytesIO
from typing import Final, NamedTuple

from werkzeug.exceptions import HTTPException
from werkzeug.formparser import FormDataParser

from .errors import http_error

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
