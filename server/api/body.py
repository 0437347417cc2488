"""From a request on the wire to a checked one: its id, its deadline, its body within its time.

Knows Quart's request; knows no endpoint.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeVar

import trio
from quart import request
from werkzeug.exceptions import RequestEntityTooLarge

from triolet.errors import RequestError, invalid_request, overloaded
from triolet.units import KIB, MILLISECONDS

from ..tenants.tenancy import current_tenant
from ..text.threads import in_thread
from .errors import echo, http_error, too_large
from .json_body import parse_object
from .request_scope import RequestScope, scope_of
from .schemas import EXTENSIONS, OTHER_EXTENSION, read_request, take_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from werkzeug.datastructures import Headers

    from triolet.config import ServerConfig

    from .schemas import ModelT
    from .services import Services

_T = TypeVar("_T")

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SECONDS: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)
JSON_ONLY: Final = frozenset({"application/json"})
_CHARSETS: Final = frozenset({"utf-8", "utf8", ""})
IGNORED_HEADER: Final = "x-triolet-ignored"
KEY_BYTES: Final = 32 * KIB
"""Of a body's beginning and end, by which a request that is sent again is known."""
INLINE_BYTES: Final = 64 * KIB
"""Bodies up to here are parsed at once, in about a millisecond; the largest take seconds, in which
no heartbeat would leave, and every worker would be thought lost."""
INLINE_OBJECTS: Final = 256
"""In such a body: 64 KiB of messages of one letter take ten times as long as 64 KiB of text."""


def current_scope() -> RequestScope:
    """Return the scope of the current request."""
    return scope_of(request.scope)


def own_request_id(headers: Headers) -> str:
    """Return the id that a client gives its request, if it is fit for headers and logs, else ""."""
    own = headers.get("x-request-id", "")
    return own if _REQUEST_ID.fullmatch(own) else ""


def shown_request_id() -> str:
    """Return the id that the answer carries: the client's own, or ours."""
    return own_request_id(request.headers) or current_scope().request_id.hex()


def deadline_s(config: ServerConfig, *, is_streamed: bool = True) -> float:
    """Return how long the request may take: what the client asks for, up to the default.

    Official clients say how long they wait for the next byte. Where that is the whole answer,
    nobody is there any more afterwards; a stream is kept alive. A line of a batch has as long as
    its batch.
    """
    within_s = current_scope().within_s
    if within_s is not None:
        return within_s
    headers = request.headers
    text = headers.get("x-request-timeout-ms")
    if text is None:
        hint = headers.get("x-stainless-read-timeout", "")
        if is_streamed or not _SECONDS.fullmatch(hint) or not float(hint):
            return config.default_deadline_s
        return min(float(hint), config.default_deadline_s)
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text) > 0):
        raise invalid_request(
            f"must be a number of milliseconds; it is {echo(text)}", "x-request-timeout-ms"
        )
    return min(int(text) * MILLISECONDS, config.default_deadline_s)


def check_model(name: str | None, config: ServerConfig) -> None:
    """Raise the RequestError for a model that is not the served one. None means whichever is."""
    if name is not None and not config.serves(name):
        raise RequestError(
            f"there is no model {echo(name)}; GET /v1/models lists them",
            status=404,
            code="model_not_found",
            param="model",
        )


async def read_fields(
    kind: type[ModelT], services: Services, *, media: Collection[str] = JSON_ONLY
) -> ModelT:
    """Return the fields in the request's body, which is JSON.

    Args:
      kind: what they are read with.
      services: what it works with.
      media: types that the body may be said to have.

    Raises:
      RequestError: 400, 408, 413 or 415; 503 if too many large bodies wait to be parsed.
    """
    if request.mimetype not in media:
        raise http_error(415, "send JSON, with content-type: application/json")
    if request.mimetype_params.get("charset", "").lower() not in _CHARSETS:
        raise http_error(415, "send UTF-8")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise http_error(415, "send the body without a content-encoding")
    body = await read_body(services.config)
    ends = (body[:KEY_BYTES], body[-KEY_BYTES:])
    current_scope().key = hash((current_tenant().name, request.path, len(body), ends))

    def parse() -> tuple[ModelT, tuple[str, ...]]:
        named = parse_object(body)
        unknown = () if services.config.strict_requests else take_unknown(kind, named)
        return read_request(kind, named), unknown

    is_quick = len(body) <= INLINE_BYTES and body.count(b"{") <= INLINE_OBJECTS
    fields, unknown = await in_parser_thread(parse, services, is_quick=is_quick)
    if unknown:
        note_ignored(unknown, services)
    return fields


def note_ignored(names: Iterable[str], services: Services) -> None:
    """Tell the client and the operator which parameters have no effect."""
    headers = current_scope().headers
    shown = [headers[IGNORED_HEADER]] if IGNORED_HEADER in headers else []
    for name in names:
        services.metrics.http.ignored(name if name in EXTENSIONS else OTHER_EXTENSION)
        shown.append(name)
    headers[IGNORED_HEADER] = ", ".join(shown)


async def in_parser_thread(parse: Callable[[], _T], services: Services, *, is_quick: bool) -> _T:
    """Return what `parse` makes of a body: at once if that is quick, else from a thread.

    Raises:
      RequestError: what `parse` raises; 429 or 503 if too many large bodies wait to be parsed.
    """
    if is_quick:
        return parse()
    with trio.move_on_after(services.config.body_timeout_s):
        return await in_thread(parse, services.parser_threads, abandon_on_cancel=True)
    raise overloaded("too many large bodies wait to be parsed", retry_after_s=1.0)


async def read_body(config: ServerConfig) -> bytes:
    """Return the request's body.

    Raises:
      RequestError: 408 if it is too slow, 413 if it is too large; 429 or 503 if there is no room
        for as much as came.
    """
    began_at = trio.current_time()
    entry = current_scope().entry
    entry.begin_work()
    body = bytearray()
    with trio.CancelScope() as scope:
        scope.deadline = began_at + config.body_grace_s
        try:
            async for data in request.body:
                body += data
                if len(body) > config.max_body_bytes:
                    raise too_large(config.max_body_bytes)
                allowed_s = config.body_grace_s + len(body) / config.body_min_bytes_per_s
                scope.deadline = began_at + min(allowed_s, config.body_timeout_s)
        except RequestEntityTooLarge:
            raise too_large(config.max_body_bytes) from None
    if entry.hold is not None and entry.hold.refusal is not None:
        raise entry.hold.refusal
    if scope.cancelled_caught:
        raise http_error(408, "the request's body did not arrive in time")
    return bytes(body)
