"""The answer to what never reaches the application: an error, after which the connection closes.

Knows bytes; sends nothing.
"""

from __future__ import annotations

import secrets
from typing import Final

from triolet.errors import RequestError, overloaded

from ..api.errors import error_body, error_headers
from .connection_table import Refused

REFUSALS: Final = {
    Refused.SERVER: overloaded(
        "this server has as many connections as it may, and a request runs on each; close some, "
        "or try again",
        retry_after_s=2.0,
    ),
    Refused.ADDRESS: RequestError(
        "your address has as many connections as one may, and a request runs on each; use those "
        "again, close some, or try later (for the operator: server.max_connections_per_address, "
        "and --trusted-proxies behind a proxy)",
        status=429,
        code="too_many_connections",
        retry_after_s=2.0,
    ),
}
"""What is said to a connection for which there is no place."""


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
