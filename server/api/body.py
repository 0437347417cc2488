"""Reads a request: its id, deadline, and body, which is parsed and validated into fields."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import trio
from quart import has_request_context, request
from werkzeug.exceptions import RequestEntityTooLarge

from triolet.errors import invalid_request
from triolet.loopback import is_loopback
from triolet.units import KIB, MILLISECONDS

from ..rollouts.conversations import Conversation, first_turn, named_user
from ..tenants.tenancy import current_tenant
from .errors import echo, http_error, too_large
from .json_body import checked_fields, named_fields
from .known_names import EXTENSIONS, OTHER_EXTENSION
from .request_scope import RequestScope, scope_of
from .schemas import TURNS_AT_ONCE, read_request

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from werkzeug.datastructures import Headers

    from triolet.config import ServerConfig

    from .request_scope import ClientConnection
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
"""Bytes of a body's start and end that identify a repeated request."""
INLINE_BYTES: Final = 16 * KIB
"""Bodies up to this size are parsed at once, within tenths of a millisecond. The largest take
seconds, during which no heartbeat could be sent and every worker would seem lost."""
INLINE_OBJECTS: Final = 64
"""The limit for elements in such a body: one-letter messages take ten times as long as the same
bytes of text."""


def current_key() -> str | None:
    """Return the request's idempotency key, or None.

    Raises:
      RequestError: 400; it is malformed, or a position was sent without a key.
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
    """Return the current request's scope."""
    return scope_of(request.scope)


VERSION_HEADER: Final = "x-triolet-model-version"
"""Response header with the digest of the model version, for models from a store."""


LEVEL_HEADER: Final = "x-triolet-brownout"
"""Response header with the brownout level, if the answer was shortened."""
CAP_HEADER: Final = "x-triolet-max-tokens"
"""Sent with it: the maximum number of output tokens."""


def show_version(digest: str) -> None:
    """Show the model's version in the headers of the current response.

    Args:
      digest: digest of the version; empty for a model that is not in a store.
    """
    if not has_request_context():
        return  # a WebSocket message has no headers
    headers = current_scope().headers
    headers.pop(VERSION_HEADER, None)
    if digest:
        headers[VERSION_HEADER] = digest


def client_request_id(headers: Headers) -> str:
    """Return the client's id of the request if it is valid in headers and logs, else ""."""
    own = headers.get("x-request-id", "")
    return own if _REQUEST_ID.fullmatch(own) else ""


def shown_request_id() -> str:
    """Return the request id to show in the response: the client's own or ours."""
    return client_request_id(request.headers) or current_scope().request_id.hex()


def longest_s(config: ServerConfig) -> float:
    """Return the longest deadline that the model and the tenant's plan allow."""
    of_plan = current_tenant().plan.deadline_s
    return config.default_deadline_s if of_plan is None else min(of_plan, config.default_deadline_s)


def deadline_s(config: ServerConfig, *, is_streamed: bool = True) -> float:
    """Return the request's deadline: the shortest of the client's, the tenant's and the model's.

    Args:
      config: the model's settings; the server's while no model is known.
      is_streamed: whether the response is a stream.

    Official clients send how long they wait for the next byte. Unless the response is a stream,
    which is kept alive, the client gives up after that time. A batch line has until its batch ends.
    """
    within_s = current_scope().within_s
    if within_s is not None:
        return within_s
    headers = request.headers
    text = headers.get("x-request-timeout-ms")
    if text is None:
        hint = headers.get("x-stainless-read-timeout", "")
        if is_streamed or not _SECONDS.fullmatch(hint) or not float(hint):
            return longest_s(config)
        return min(float(hint), longest_s(config))
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text) > 0):
        raise invalid_request(
            f"must be a number of milliseconds, not {echo(text)}", "x-request-timeout-ms"
        )
    return min(int(text) * MILLISECONDS, longest_s(config))


async def read_fields(kind: type[ModelT], services: Services) -> ModelT:
    """Parse and validate the JSON body, whatever its content-type.

    Clients send other types: curl's default is a form, LiteLLM's is text/plain or, in newer
    versions, application/octet-stream. `check_origin` has already restricted web pages.

    Args:
      kind: the request model.
      services: the server's parts.

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
        named, unknown = named_fields(kind, bytes(body), is_strict)
        fields = read_request(kind, named)
    else:
        named, unknown = await services.do(checked_fields, kind.__name__, body, is_strict)
        fields = await read_checked(kind, named)
    if unknown:
        note_ignored(unknown, services)
    if services.models.routes:
        current_scope().conversation = begun_conversation(
            named,
            request.headers,
            current_scope().connection,
            is_messages=request.path.startswith("/v1/messages"),
        )
    return fields


SESSION_HEADER: Final = "x-triolet-session"
"""Request header that names a conversation, for clients that name no user."""
ASKED_VERSION_HEADER: Final = "x-triolet-version"
"""Request header with which an operator names a version."""


FORWARDED: Final = frozenset({"forwarded", "x-forwarded-for", "x-real-ip", "via"})
"""Headers that a proxy adds to a request that it forwards."""


def is_from_here(peer: ClientConnection, headers: Headers) -> bool:
    """Return whether a request comes from this machine and is not forwarded for another client.

    Args:
      peer: its connection, whose other end headers cannot change.
      headers: its headers.
    """
    header_names = {name.lower() for name in headers.keys()}  # noqa: SIM118 (multi-dict)
    is_local = peer.is_unix or is_loopback(peer.host)
    return is_local and not peer.is_forwarding and not header_names & FORWARDED


def begun_conversation(
    body: Mapping[str, Any],
    headers: Headers,
    peer: ClientConnection,
    before: Conversation | None = None,
    *,
    is_messages: bool = False,
) -> Conversation:
    """Return the conversation that a request belongs to.

    Args:
      body: the request's fields.
      headers: its headers, or those of its WebSocket.
      peer: its connection.
      before: the conversation of the WebSocket so far, which the request continues unless it names
        another user.
      is_messages: whether the body is of the Messages API.
    """
    user = named_user(body, headers.get(SESSION_HEADER, ""), is_messages=is_messages)
    if before is not None and user in ("", before.user):
        return before
    named = headers.get(ASKED_VERSION_HEADER, "")
    may_name = bool(named) and is_from_here(peer, headers)
    return Conversation(user or first_turn(body), named, is_from_here=may_name)


async def read_checked(kind: type[ModelT], named: dict[str, Any]) -> ModelT:
    """Build a request model from validated fields, constructing long lists piece by piece.

    Args:
      kind: the request model; it must have no validator across elements of a list.
      named: valid field values, by name.
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
    """Report parameters without effect to the client and to the metrics."""
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
    """Read the request's body. A large one is not copied, which would take milliseconds.

    Raises:
      RequestError: 408 if it is too slow, 413 if it is too large; 429 or 503 if there is no room
        for it.
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
