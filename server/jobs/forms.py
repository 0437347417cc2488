"""What the bodies of /v1/files and /v1/batches hold. Text processes read the large ones, so nothing
here knows of a request."""

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
"""That werkzeug reads at once."""
MAX_FIELD_BYTES: Final = 2 * PIECE_BYTES
"""Of plain fields; also bounds what the parser holds of a file at a time, a piece and what may be
the beginning of its end."""


class FileUpload(NamedTuple):
    """The parts of an upload.

    Attributes:
      fields: plain ones, by name.
      filename: of the file, as its client calls it.
      content: of the file.
    """

    fields: dict[str, str]
    filename: str
    content: bytes


@job
def parse_upload(body: bytes, mimetype: str, options: dict[str, str]) -> FileUpload:
    """Return the file named `file` and the fields beside it.

    Raises:
      RequestError: 400; it is no such form.
    """
    # The library takes 30 ms that the start of every text process would pay.
    from werkzeug.exceptions import HTTPException
    from werkzeug.formparser import FormDataParser

    parser = FormDataParser(
        stream_factory=lambda *_, **__: BytesIO(),  # the body as a whole is bounded already
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
        raise ValueError("must be a time such as 24h: a number of s, m, h or d, up to 30d")
    return value


def seconds_of_window(window: str) -> int:
    """Return the seconds of a checked window."""
    return int(window[:-1]) * _UNIT_S[window[-1]]


class BatchFields(StrictModel):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description="Id of an uploaded file of requests."
    )
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
    ] = Field(description="Route that all lines of the file are for.")
    completion_window: Annotated[
        str, BeforeValidator(_window), Field(pattern="^[1-9][0-9]{0,5}[smhd]$")
    ] = Field(description="Longest time until the end, such as 24h: s, m, h or d, up to 30d.")
    metadata: Metadata | None = Field(
        default=None, description="Pairs of texts that come back with the batch; default: none."
    )
