"""From a request on the wire to checked fields: id, deadline, body within its time, strict JSON.

JSON is refused beyond bad syntax for: a byte order mark, other encodings than UTF-8, NaN, numbers
that overflow to infinity, duplicate keys (two readers would see two documents), lone surrogates
(they cannot be encoded again), depth that exhausts the parser, objects with very many keys (each
unknown one would make an error of its own) and very many values: the parser holds the
interpreter's lock, and 16 MiB of `[1],` stop all streams for seconds.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio
from quart import has_request_context, request
from werkzeug.exceptions import RequestEntityTooLarge

from triolet.errors import RequestError, invalid_request, overloaded
from triolet.units import KIB, MILLISECONDS

from ..tenants.tenancy import current_tenant
from ..text.threads import in_thread
from .errors import echo, http_error, too_large
from .known_names import EXTENSIONS, OTHER_EXTENSION
from .request_scope import RequestScope, scope_of
from .schemas import ModelT, read_request, take_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from werkzeug.datastructures import Headers

    from triolet.config import ServerConfig

    from .services import Services


MAX_KEYS: Final = 1024
"""Three times the largest object that any endpoint takes."""
MAX_VALUES: Final = 1 << 20
"""In one body, about: more token ids than contexts hold, and 0.1 s of the parser."""
MAX_CONTAINERS: Final = 1 << 16
"""Arrays and objects in one body: each costs ten times what a number does."""
MAX_WHOLE: Final = 1 << 63
"""The largest integer of any field; beyond, a float with an integer's value stays a float."""
_BOM = b"\xef\xbb\xbf"


class _Refused(ValueError):
    """Valid JSON that is not accepted."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise _Refused(f"an object has more than {MAX_KEYS} keys")
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"the key {echo(key)} occurs twice in one object")
            seen.add(key)
    return value


def _number(text: str) -> float:
    """Return a number; as an integer where its value is one, as JSON Schema has it: 1.0 is 1."""
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"the number {echo(text)} is too large")
    return int(value) if value.is_integer() and abs(value) <= MAX_WHOLE else value


def _constant(text: str) -> float:
    raise _Refused(f"{text} is not a number in JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_number, parse_constant=_constant
)


def _bad(reason: str) -> RequestError:
    return http_error(400, f"the body is not valid JSON: {reason}")


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Raises:
      RequestError: 400, with the place of the fault.
    """
    if not body:
        raise http_error(400, "the body is empty; send a JSON object")
    if body.startswith(_BOM):
        raise _bad("it begins with a byte order mark; send UTF-8 without one")
    if holds_many_values(body):
        raise _bad(f"it holds more than {MAX_VALUES} values or {MAX_CONTAINERS} arrays and objects")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(f"byte {error.start} is not UTF-8") from None
    try:
        value = _DECODER.decode(text)
    except _Refused as error:
        raise _bad(str(error)) from None
    except RecursionError:
        raise _bad("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _bad(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except ValueError:
        # Only the conversion of an integer of more than 4300 digits ends here.
        raise _bad("an integer has too many digits") from None
    if not isinstance(value, dict):
        raise http_error(400, "the body is not a JSON object")
    if "\\ud" in text or "\\uD" in text:
        _refuse_lone_surrogates(value)
    return value


def holds_many_values(body: bytes) -> bool:
    """Count what lies between the strings, before anything is made of it."""
    if len(body) <= MAX_CONTAINERS or not _has_many(body):
        return False
    if body.count(b"\\\\") > MAX_VALUES or body.count(b'\\"') > MAX_VALUES:
        return True  # to look behind so many escapes would take as long
    # A quotation mark that is left then begins or ends a string.
    rest = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return rest.count(b'"') > 2 * MAX_VALUES or _has_many(b"".join(rest.split(b'"')[::2]))


def _has_many(body: bytes) -> bool:
    num_containers = body.count(b"[") + body.count(b"{")
    return num_containers > MAX_CONTAINERS or body.count(b",") > MAX_VALUES


def _refuse_lone_surrogates(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _bad("a string holds half of a surrogate pair") from None


_T = TypeVar("_T")

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SECONDS: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)
_CHARSETS: Final = frozenset({"utf-8", "utf8", ""})
IGNORED_HEADER: Final = "x-triolet-ignored"
KEY: Final = "idempotency-key"
LAST_EVENT_ID: Final = "last-event-id"
_VISIBLE: Final = re.compile(r"[\x21-\x7e]{1,255}")
KEY_BYTES: Final = 32 * KIB
"""Of a body's beginning and end, by which a request that is sent again is known."""
INLINE_BYTES: Final = 64 * KIB
"""Bodies up to here are parsed at once, in about a millisecond; the largest take seconds, in which
no heartbeat would leave, and every worker would be thought lost."""
INLINE_OBJECTS: Final = 256
"""In such a body: 64 KiB of messages of one letter take ten times as long as 64 KiB of text."""


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
