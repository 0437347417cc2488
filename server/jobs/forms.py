"""Request bodies of /v1/files and /v1/batches. Text processes parse the large ones, so this module
does not use the current request."""

from __future__ import annotations

import re
from io import BytesIO
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from ..api.errors import http_error
from ..api.fields import Metadata  # noqa: TC001 (pydantic reads the annotations)
from ..api.schemas import StrictModel
from ..text.process import job

MAX_PARTS: Final = 16
PIECE_BYTES: Final = 64 * 1024
"""The block size in which werkzeug reads."""
MAX_FIELD_BYTES: Final = 2 * PIECE_BYTES
"""Maximum size of all plain fields. Also bounds how much of a file the parser buffers at a time: a
block, and a possible start of the boundary."""


class FileUpload(NamedTuple):
    """The parts of an upload.

    Attributes:
      fields: plain fields, by name.
      filename: the file's name, from the client.
      content: the file's bytes.
    """

    fields: dict[str, str]
    filename: str
    content: bytes


@job
def parse_upload(body: bytes, mimetype: str, options: dict[str, str]) -> FileUpload:
    """Return the part named `file` and the plain fields.

    Raises:
      RequestError: 400; the body is not a valid form.
    """
    # Importing werkzeug here saves every text process 30 ms at start.
    from werkzeug.exceptions import HTTPException
    from werkzeug.formparser import FormDataParser

    parser = FormDataParser(
        stream_factory=lambda *_, **__: BytesIO(),  # the whole body is already limited
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
    return FileUpload(names, str(found.filename or "")[:256], found.stream.read())


MAX_WINDOW_NUMBER: Final = 999_999
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MAX_WINDOW_S: Final = 30 * 86_400


def _window(value: object) -> object:
    found = _WINDOW.fullmatch(value) if isinstance(value, str) else None
    if found is None or seconds_of_window(found[0]) > MAX_WINDOW_S:
        raise ValueError("must be a duration such as 24h: a number with s, m, h or d, up to 30d")
    return value


def seconds_of_window(window: str) -> int:
    """Return the seconds of a validated window."""
    return int(window[:-1]) * _UNIT_S[window[-1]]


class BatchFields(StrictModel):
    """The body of POST /v1/batches."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description="Id of the uploaded file of requests."
    )
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
    ] = Field(description="Route that all requests of the file use.")
    completion_window: Annotated[
        str, BeforeValidator(_window), Field(pattern="^[1-9][0-9]{0,5}[smhd]$")
    ] = Field(description="Time limit of the batch, such as 24h: s, m, h or d, up to 30d.")
    metadata: Metadata | None = Field(
        default=None, description="Keys and values that are returned with the batch; default: none."
    )
