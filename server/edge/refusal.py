"""The answer to what never reaches the application: an error, after which the connection closes.

Knows bytes; sends nothing.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from ..api.errors import error_body, error_headers

if TYPE_CHECKING:
    from triolet.errors import RequestError


def refusal(error: RequestError) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the headers and the body of the answer."""
    body = error_body(error)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-request-id": secrets.token_hex(16),
        **error_headers(error),
    }
    return [(name.encode(), value.encode()) for name, value in headers.items()], body


def refusal_bytes(error: RequestError) -> bytes:
    """Return the whole answer, for a connection that no parser has seen."""
    headers, body = refusal(error)
    head = b"".join(b"%b: %b\r\n" % header for header in headers)
    return b"HTTP/1.1 %d \r\n%b\r\n%b" % (error.status, head, body)
