"""Tests of parsing multipart uploads: files of every size come back unchanged, and malformed forms
get a 400."""

from __future__ import annotations

import pytest

from server.jobs.forms import MAX_FIELD_BYTES, MAX_PARTS, parse_upload
from triolet.errors import RequestError

BOUNDARY = "0123456789abcdef" * 4


def form(*parts: tuple[str, bytes]) -> bytes:
    """Return a body with these parts, given as the disposition after `form-data; ` and the
    content."""
    told = [
        f"--{BOUNDARY}\r\nContent-Disposition: form-data; {named}\r\n\r\n".encode() + content
        for named, content in parts
    ]
    return b"\r\n".join([*told, f"--{BOUNDARY}--\r\n".encode()])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}\n",
        b'{"custom_id": "1"}\n' * 100_000,
        b"x" * 3_000_000,
        b"\r\n" * 200_000,
        f"\r\n--{BOUNDARY[:-1]}".encode() * 5_000,
        b"y" * (MAX_FIELD_BYTES - 100),
    ],
    ids=["nothing", "one", "lines", "no line ends", "line ends", "nearly ends", "as a field"],
)
def test_a_file_of_any_size_is_read_back(content: bytes) -> None:
    body = form(('name="purpose"', b"batch"), ('name="file"; filename="in.jsonl"', content))
    upload = parse_upload(body, "multipart/form-data", {"boundary": BOUNDARY})
    assert upload.fields == {"purpose": "batch"}
    assert upload.filename == "in.jsonl"
    assert upload.content == content


@pytest.mark.parametrize(
    "parts",
    [
        [('name="purpose"', b"b" * (MAX_FIELD_BYTES + 1)), ('name="file"; filename="f"', b"")],
        [('name="purpose"', b"batch")],
        [('name="file"; filename="f"', b"")] * (MAX_PARTS + 1),
    ],
    ids=["a large field", "no file", "many parts"],
)
def test_what_is_no_such_form_is_refused(parts: list[tuple[str, bytes]]) -> None:
    with pytest.raises(RequestError) as found:
        parse_upload(form(*parts), "multipart/form-data", {"boundary": BOUNDARY})
    assert found.value.status == 400
