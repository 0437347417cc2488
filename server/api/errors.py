"""How request errors are returned to clients: HTTP status, JSON body and retry headers.

Independent of the web framework, because the HTTP request parser and the WebSocket use it too.
"""

from __future__ import annotations

import math
import random
import reprlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from triolet.errors import RequestError, invalid_request

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_RETRY_AFTER_S = 120.0
"""Official clients do not retry after a longer wait. Times that are already spread are sent as they
are, since an earlier request would be refused."""
RETRY_JITTER = 0.25
"""Random share added to the wait, so that clients refused together do not retry together."""
MAX_ECHO = 200
"""Maximum characters of a client's input that an error repeats."""


class _Briefly(reprlib.Repr):
    """A truncated repr of JSON values, in JSON's notation."""

    def repr_bool(self, value: bool, level: int) -> str:
        return str(value).lower()

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"


_BRIEFLY = _Briefly()
_BRIEFLY.maxstring = _BRIEFLY.maxlong = _BRIEFLY.maxother = MAX_ECHO

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}

FINAL_CODES = frozenset(
    {"idempotency_conflict", "resume_expired", "answer_lost", "insufficient_quota"}
)
"""Codes that clients should not retry: official clients retry every 409 and 429."""

UNSUPPORTED_PARAMETER = "unsupported_parameter"
"""The error code of a known but unsupported parameter."""

CODES = {
    400: "invalid_request_error",
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    431: "headers_too_large",
    500: "server_error",
    505: "http_version_not_supported",
}
"""The error code of each status that the API layer itself returns."""


def http_error(status: int, message: str, param: str | None = None) -> RequestError:
    """Return an error with the status's default code."""
    return RequestError(message, status=status, code=CODES[status], param=param)


def too_large(max_body_bytes: int) -> RequestError:
    """Return the error for a body above the size limit."""
    return http_error(413, f"the request's body is larger than {max_body_bytes} bytes")


def unsupported(param: str, what: str) -> RequestError:
    """Return the error for a known but unsupported parameter."""
    message = f"{what} is not supported by this server"
    return invalid_request(message, param, code=UNSUPPORTED_PARAMETER)


@contextmanager
def params_called(names: Mapping[str, str]) -> Iterator[None]:
    """Rename parameters in errors to another API's names.

    Args:
      names: the other API's names, by ours or by a prefix of ours, longer prefixes first. `*`
        matches any one part, such as an index.
    """
    try:
        yield
    except RequestError as error:
        param = _renamed((error.param or "").split("."), names)
        if param is None:
            raise
        raise RequestError(**error.said | {"param": param}) from error


def _renamed(parts: list[str], names: Mapping[str, str]) -> str | None:
    for old, new in names.items():
        pairs = list(zip(old.split("."), parts, strict=False))
        if len(pairs) == old.count(".") + 1 and all(name in ("*", part) for name, part in pairs):
            any_parts = iter([part for name, part in pairs if name == "*"])
            begin = [next(any_parts) if name == "*" else name for name in new.split(".")]
            return ".".join([*begin, *parts[len(pairs) :]])
    return None


def message_with_param(error: RequestError) -> str:
    """Return an error's message with its parameter, for formats without a field for it."""
    if error.param and not error.message.startswith(error.param):
        return f"{error.param}: {error.message}"
    return error.message


def error_object(error: RequestError) -> dict[str, Any]:
    """Return the JSON object of the key `error`."""
    kind = _TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"message": error.told, "type": kind, "param": error.param, "code": error.code}


def error_body(error: RequestError) -> bytes:
    """Return the JSON body of an error."""
    return msgspec.json.encode({"error": error_object(error)})


def error_headers(error: RequestError) -> dict[str, str]:
    """Return the headers of an error response."""
    if error.status == 401:
        return {"www-authenticate": "Bearer"}
    if error.code in FINAL_CODES:
        return {"x-should-retry": "false"}
    if error.retry_after_s is None:
        return {}
    wait_s = error.retry_after_s
    if not error.is_spread:
        wait_s = min(MAX_RETRY_AFTER_S, wait_s * (1 + RETRY_JITTER * random.random()))
    return {
        "retry-after": str(max(1, math.ceil(wait_s))),
        "retry-after-ms": str(math.ceil(wait_s * 1000)),
    }


def echo(value: object) -> str:
    """Return a client's input, truncated and without control characters, for use in an error."""
    shown = _BRIEFLY.repr(value).encode("ascii", "backslashreplace").decode()
    return shown if len(shown) <= MAX_ECHO else shown[:MAX_ECHO] + "..."
