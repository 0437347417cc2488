"""The error table: how an error of a request looks to its client.

HTTP status, JSON form and the headers for retries. Free of the framework, so that the parser of
request heads and the WebSocket use it as well.
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
"""Above this the official clients do not retry at all. A time that is spread already is said as it
is: a request that came sooner would find no room."""
RETRY_JITTER = 0.25
"""Share added at random, so that clients refused together do not come back together."""
MAX_ECHO = 200
"""Characters of a client's own input that an error repeats."""


class _Briefly(reprlib.Repr):
    """Values of JSON, cut, in JSON's words."""

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

FINAL_CODES = frozenset({"idempotency_conflict", "resume_expired", "insufficient_quota"})
"""Official clients retry every 409 and 429; these stay what they are."""

UNSUPPORTED_PARAMETER = "unsupported_parameter"
"""The code of a parameter that is known but not served."""

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
"""The stable word of each status that the surface itself decides on."""


def http_error(status: int, message: str, param: str | None = None) -> RequestError:
    """Return an error with the status's own code."""
    return RequestError(message, status=status, code=CODES[status], param=param)


def too_large(max_body_bytes: int) -> RequestError:
    """Return the error for a body beyond the bound."""
    return http_error(413, f"the request's body is larger than {max_body_bytes} bytes")


def unsupported(param: str, what: str) -> RequestError:
    """Return the error for a parameter that is known but not served here."""
    message = f"{what} is not supported by this server"
    return invalid_request(message, param, code=UNSUPPORTED_PARAMETER)


@contextmanager
def params_called(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name parameters as another API calls them.

    Args:
      names: by what they are called here, or how their names begin, longer beginnings first; `*`
        is any one part, such as a number.
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
    """Return an error's message with its parameter's name, for forms that have no field for it."""
    if error.param and not error.message.startswith(error.param):
        return f"{error.param}: {error.message}"
    return error.message


def error_object(error: RequestError) -> dict[str, Any]:
    """Return the value of the key `error`."""
    kind = _TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"message": error.told, "type": kind, "param": error.param, "code": error.code}


def error_body(error: RequestError) -> bytes:
    """Return the JSON document of an error."""
    return msgspec.json.encode({"error": error_object(error)})


def error_headers(error: RequestError) -> dict[str, str]:
    """Return the headers that an error needs beside its body."""
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
    """Return a client's own input, cut to what an error may repeat, and free of control codes."""
    shown = _BRIEFLY.repr(value).encode("ascii", "backslashreplace").decode()
    return shown if len(shown) <= MAX_ECHO else shown[:MAX_ECHO] + "..."
