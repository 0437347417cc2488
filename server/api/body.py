"""From a request on the wire to checked fields: id, deadline, body within its time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import trio
from quart import has_request_context, request
from werkzeug.exceptions import RequestEntityTooLarge

from triolet.errors import invalid_request
from triolet.units import KIB, MILLISECONDS

from ..tenants.tenancy import current_tenant
from .errors import echo, http_error, too_large
from .json_body import checked_fields, read_body_fields
from .known_names import EXTENSIONS, OTHER_EXTENSION
from .request_scope import RequestScope, scope_of
from .schemas import TURNS_AT_ONCE, read_request

if TYPE_CHECKING:
    from collections.abc import Iterable

    from werkzeug.datastructures import Headers

    from triolet.config import ServerConfig

    from .schemas import ModelT
    from .services import Services


_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SECONDS: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)
_CHARSETS: Final = frozenset({"utf-8", "utf8", ""})
IGNORED_HEADER: Final = "x-triolet-ignored"
KEY: Final = "idempotency-key"
LAST_EVENT_ID: Final = "last-event-id"
_VISIBLE: Final = re.compile(r"[\x21-\x7e]{1,255}")
KEY_BYTES: Final = 32 * KIB
"""Of a body's beginning and end, by which a request that is sent again is known."""
INLINE_BYTES: Final = 16 * KIB
"""Bodies up to here are parsed at once, in a few tenths of a millisecond; the largest take seconds,
in which no heartbeat would leave, and every worker would be thought lost."""
INLINE_OBJECTS: Final = 64
"""In such a body: messages of one letter take ten times as long as as many bytes of text."""


def current_key() -> str | None:
    """Return the key that the client gave its request, or None.

    Raises:
      RequestError: 400, it is none, or there is a position without a key.
    """
    headers = request.headers
    key = headers.get(KEY)
    if key is None:
        if LAST_EVENT_ID in headers:
            raise invalid_request(
                f"only a request with {KEY} can be continued: send the same request, with both",
                LAST_EVENT_ID,
            )
        return None
    if not _VISIBLE.fullmatch(key):
        raise invalid_request(f"must be 1 to 255 visible ASCII characters: {echo(key)}", KEY)
    return key


def current_scope() -> RequestScope:
    """Return the scope of the current request."""
    return scope_of(request.scope)


VERSION_HEADER: Final = "x-triolet-model-version"
"""On answers of a model that is a version of a store: its digest."""


LEVEL_HEADER: Final = "x-triolet-brownout"
"""On answers that are shorter than their clients asked for: the level of brownout."""
CAP_HEADER: Final = "x-triolet-max-tokens"
"""With it: how long the answer may get."""


def show_version(digest: str) -> None:
    """Let the headers of the current request's answer name the version of its model.

    Args:
      digest: of the version; empty for a model that is in no store.
    """
    if not has_request_context():
        return  # a message of a WebSocket
    headers = current_scope().headers
    headers.pop(VERSION_HEADER, None)
    if digest:
        headers[VERSION_HEADER] = digest


def client_request_id(headers: Headers) -> str:
    """Return the id that a client gives its request, if it is fit for headers and logs, else ""."""
    own = headers.get("x-request-id", "")
    return own if _REQUEST_ID.fullmatch(own) else ""


def shown_request_id() -> str:
    """Return the id that the answer carries: the client's own, or ours."""
    return client_request_id(request.headers) or current_scope().request_id.hex()


def deadline_s(config: ServerConfig, *, is_streamed: bool = True) -> float:
    """Return how long the request may take: what the client asks for, up to the default.

    Official clients say how long they wait for the next byte. Where that is the whole answer,
    the client is gone afterwards; a stream is kept alive. A line of a batch has as long as
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


async def read_fields(kind: type[ModelT], services: Services) -> ModelT:
    """Return the fields in the request's body, which is JSON whatever its content-type says.

    Clients name others (curl's default is a form's, LiteLLM's text/plain or, in newer versions,
    application/octet-stream). What a page of another origin may send is decided before, by
    `check_origin`.

    Args:
      kind: what they are read with.
      services: what it works with.

    Raises:
      RequestError: 400, 408, 413 or 415; 503 if too many large bodies wait to be parsed.
    """
    if request.mimetype.startswith("multipart/"):
        raise http_error(
            415, f"{echo(request.path)} takes JSON; the content-type is {echo(request.mimetype)}"
        )
    charset = request.mimetype_params.get("charset", "")
    if charset.lower() not in _CHARSETS:
        raise http_error(415, f"the content-type says charset {echo(charset)}; send JSON in UTF-8")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise http_error(
            415, f"the content-encoding is {echo(encoding)}; send the body without one"
        )
    body = await read_body(services.config)
    ends = (bytes(body[:KEY_BYTES]), bytes(body[-KEY_BYTES:]))
    current_scope().key = hash((current_tenant().name, request.path, len(body), ends))

    is_strict = services.config.strict_requests
    if is_quick(body):
        fields, unknown = read_body_fields(kind, bytes(body), is_strict)
    else:
        named, unknown = await services.do(checked_fields, kind.__name__, body, is_strict)
        fields = await read_checked(kind, named)
    if unknown:
        note_ignored(unknown, services)
    return fields


async def read_checked(kind: type[ModelT], named: dict[str, Any]) -> ModelT:
    """Return fields that have been checked, long lists of objects some elements at a time.

    Args:
      kind: what they are read with; it has no rule about two elements of a list.
      named: by their names; nothing is wrong with them.
    """
    long = {
        name: value
        for name, value in named.items()
        if name in kind.model_fields
        and isinstance(value, list)
        and len(value) > TURNS_AT_ONCE
        and isinstance(value[0], dict)
    }
    begun = named | {name: value[:TURNS_AT_ONCE] for name, value in long.items()}
    fields = read_request(kind, begun)
    for name, value in long.items():
        whole = [*getattr(fields, name)]
        for at in range(TURNS_AT_ONCE, len(value), TURNS_AT_ONCE):
            await trio.lowlevel.checkpoint()
            few = read_request(kind, begun | {name: value[at : at + TURNS_AT_ONCE]})
            whole += getattr(few, name)
        fields = fields.model_copy(update={name: whole})
    return fields


def note_ignored(names: Iterable[str], services: Services) -> None:
    """Tell the client and the operator which parameters have no effect."""
    headers = current_scope().headers
    shown = [headers[IGNORED_HEADER]] if IGNORED_HEADER in headers else []
    for name in names:
        services.metrics.http.ignored(name if name in EXTENSIONS else OTHER_EXTENSION)
        shown.append(name)
    headers[IGNORED_HEADER] = ", ".join(shown)


def is_quick(body: bytes | bytearray) -> bool:
    """Whether a body is small enough to be parsed at once."""
    return len(body) <= INLINE_BYTES and body.count(b"{") <= INLINE_OBJECTS


async def read_body(config: ServerConfig) -> bytes | bytearray:
    """Return the request's body. A large one is not copied: that takes milliseconds.

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
    return bytes(body) if len(body) <= INLINE_BYTES else body
