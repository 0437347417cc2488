"""Access checks on requests before their body is read: host, origin, API key, rate and body size.

Any web page can send requests to localhost (cross-site request forgery), and a host name that its
owner points at 127.0.0.1 gives that page our origin (DNS rebinding). So on a loopback address only
known host names are served, and browser requests from other origins are refused unless the origin
is allowed (CORS). No response permits credentials such as cookies: pages set keys in headers.
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import trio
from quart import Request, Response, request, websocket

from triolet.config import ANY_ORIGIN
from triolet.errors import RequestError
from triolet.loopback import is_loopback
from triolet.tenants.plans import Tenant, TenantRole

from ..tenants.tenancy import current_tenant, enter_tenant
from ..text.turns import current_line, enter_line
from .errors import echo, http_error
from .gateway_hints import FAIRNESS_ID, OBJECTIVE
from .limits import enter_batch_line, enter_request
from .proxying import claim_answer, is_proxied, owner_elsewhere
from .request_scope import RequestEntry, scope_of
from .resuming import has_answer
from .route import METHODS, Permission

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from werkzeug.datastructures import Headers

    from .request_scope import ClientConnection
    from .route import Route, RouteTable
    from .services import Services


_HOST: Final = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::\d{1,5})?")
_HEADER_NAMES: Final = re.compile(r"[A-Za-z0-9-]{1,64}(?:[ \t]*,[ \t]*[A-Za-z0-9-]{1,64}){0,63}")
USUAL_HEADERS: Final = "authorization, content-type, x-api-key"
"""Headers that a preflight allows if it names none."""
SHOWN_HEADERS: Final = ("x-", "request-id", "retry-after", "openai-processing-ms", "age", "www-")
"""Prefixes of response headers that scripts of other origins may read, beside the few that the
standard always exposes."""
_ASKED_FIRST: Final = frozenset({"application/json", "multipart/form-data"})
"""Body types that get a 403 from a foreign origin. Browsers send a preflight for the first; the
second is for file uploads, which need it."""
_OTHER_SITES: Final = frozenset({"cross-site", "same-site"})
"""Values of Sec-Fetch-Site for pages of other origins."""
LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


def check_host(host: str | None, own_name: str) -> None:
    """Raise RequestError for a Host header that does not name this server.

    Args:
      host: the header; None for an HTTP/1.0 client without one, which is no browser.
      own_name: the configured host. If other machines can reach it, any host name is accepted: a
        proxy may be in front, and DNS rebinding gains nothing over a direct request.
    """
    if host is None or host == "":
        return
    match = _HOST.fullmatch(host)
    if match is None:
        raise http_error(400, f"the Host header {echo(host)} is malformed")
    name = match["name"].lower()
    is_ours = name in LOCAL_NAMES or name.strip("[]") == own_name.lower()
    if not is_ours and is_loopback(own_name):
        raise http_error(
            403, f"this server does not accept the host name {echo(name)}; use localhost"
        )


def check_origin(
    origin: str | None, host: str | None, allowed: Collection[str], media: str | None = None
) -> None:
    """Raise RequestError for a request from a web page of another origin.

    Programs may send JSON with any content-type; only browsers send an Origin. A foreign page can
    send a body without a preflight if its type is not application/json, so that type is required
    first, and then permission.

    Args:
      origin: the Origin header; None from anything but a browser.
      host: the Host header.
      allowed: other origins that are allowed.
      media: the body's content-type; empty if missing, None without a body.
    """
    if origin is None or shown_origin(origin, allowed) is not None:
        return
    if _is_own(origin, host):
        return
    if media is None or media in _ASKED_FIRST:
        raise http_error(
            403, f"requests from pages of {echo(origin)} are not allowed; see --allow-origin"
        )
    raise http_error(
        415,
        f"pages of {echo(origin)} must send JSON with content-type: application/json, and be "
        "allowed by --allow-origin",
    )


def _origin(headers: Headers) -> str | None:
    """Return the Origin; `null` for a page of another site whose browser hides the Origin."""
    is_foreign = headers.get("sec-fetch-site") in _OTHER_SITES
    return headers.get("origin", "null" if is_foreign else None)


def _is_own(origin: str, host: str | None) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and parts.netloc.lower() == (host or "").lower() != ""


def shown_origin(origin: str | None, allowed: Collection[str]) -> str | None:
    """Return the value of `Access-Control-Allow-Origin`; None for an origin not allowed."""
    if origin is None or not allowed:
        return None
    if ANY_ORIGIN in allowed:
        return ANY_ORIGIN
    return origin if origin in allowed else None


def page_headers(
    origin: str | None, allowed: Collection[str], names: Iterable[str]
) -> dict[str, str]:
    """Return the CORS headers that let a page of another origin read a response.

    Args:
      origin: the Origin header of the request.
      allowed: allowed origins; not empty.
      names: names of the response's headers.
    """
    # Also without an Origin: caches must not serve that response to pages.
    headers = {"vary": "Origin"}
    shown = shown_origin(origin, allowed)
    if shown is not None:
        exposed = sorted({name.lower() for name in names if name.lower().startswith(SHOWN_HEADERS)})
        headers["access-control-allow-origin"] = shown
        headers["access-control-expose-headers"] = ", ".join(exposed)
    return headers


def preflight_headers(wanted: str | None, max_age_s: int) -> dict[str, str]:
    """Return the response headers of an allowed origin's preflight, beside `page_headers`.

    Args:
      wanted: header names that the page wants to send. All are allowed: no header but the key
        proves anything about the sender.
      max_age_s: how long the browser may cache the response.
    """
    is_list = wanted is not None and _HEADER_NAMES.fullmatch(wanted.strip()) is not None
    return {
        "access-control-allow-methods": ", ".join(METHODS),
        "access-control-allow-headers": wanted.strip() if wanted and is_list else USUAL_HEADERS,
        "access-control-max-age": str(max_age_s),
    }


SUBPROTOCOL: Final = "triolet"
"""The subprotocol that a browser's WebSocket offers beside the key's. A browser cannot set headers
on a WebSocket, and URLs end up in logs and histories."""
KEY_SUBPROTOCOL: Final = "triolet-key."
"""Prefix of the base64url key in Sec-WebSocket-Protocol."""


def sent_key(
    authorization: str | None, x_api_key: str | None, subprotocols: Iterable[str] = ()
) -> str | None:
    """Return the request's API key, or None.

    Args:
      authorization: the header; OpenAI's clients send `Bearer KEY`.
      x_api_key: the header; Anthropic's clients send the key there.
      subprotocols: subprotocols that a browser's WebSocket offers.
    """
    if authorization is not None:
        scheme, _, key = authorization.partition(" ")
        return key.strip() if scheme.lower() == "bearer" else None
    if x_api_key is not None:
        return x_api_key.strip()
    for offered in subprotocols:
        if offered.startswith(KEY_SUBPROTOCOL):
            return _decoded(offered.removeprefix(KEY_SUBPROTOCOL))
    return None


def _decoded(text: str) -> str | None:
    try:
        padded = text + "=" * (-len(text) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None


SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
BODY_UNDER_WAY_S: Final = 0.1
"""How long to wait for the short body of a refused request that was sent with its headers."""


def origins_here(services: Services, route: Route) -> Sequence[str]:
    """Return the origins that may use a route."""
    return services.config.allow_origins if route.is_for_pages else ()


async def check_request(services: Services, routes: RouteTable) -> Response | None:
    """Authenticate this request, make its tenant the current one, and read its body.

    For a path or method that does not exist, any tenant's key is accepted.

    Returns:
      The response to a browser's preflight, which carries no key; None for any other request.

    Raises:
      RequestError: 401 or 403; 429 or 503 before the body is read.
    """
    # The proxy resolves the request at each access, which costs every request a microsecond.
    asked: Request = request._get_current_object()  # type: ignore[attr-defined]
    headers = asked.headers
    check_host(headers.get("host"), services.config.host)
    if OBJECTIVE in headers or FAIRNESS_ID in headers:
        services.objectives.enter(headers)
    route = routes.find(asked.endpoint)
    permission = Permission.USER if route is None else route.permission
    origins = origins_here(services, routes.nearest(asked.endpoint, asked.path))
    preflight = _answer_preflight(services, asked, origins)
    scope = scope_of(asked.scope)
    owner = scope.owner
    if owner is not None:
        # Internal batch request: clients cannot reach this branch.
        enter_batch_line(scope.once_id)
        enter_tenant(services.tenancy.tenant_named(owner))
        enter_line(f"batches of {owner}")
    elif preflight is None and (
        (permission is not Permission.NONE and not scope.connection.is_unix) or is_proxied(services)
    ):
        tenant = check_key(services, scope.connection, headers)
        if permission is Permission.OPERATOR and tenant.role is not TenantRole.OPERATOR:
            raise http_error(
                403, f"{echo(asked.path)} needs the key of a tenant whose role is operator"
            )
    if asked.method not in SAFE_METHODS:
        media = asked.mimetype if asked.method == "POST" else None
        check_origin(_origin(headers), headers.get("host"), origins, media)
    if owner is None:
        enter_line(current_tenant().name or asked.remote_addr or "")
    await let_in(services, asked, route)
    return preflight


def _answer_preflight(
    services: Services, asked: Request, origins: Sequence[str]
) -> Response | None:
    """Return the response to a CORS preflight from an allowed origin; None for other requests."""
    headers = asked.headers
    if asked.method != "OPTIONS" or "access-control-request-method" not in headers:
        return None
    if shown_origin(headers.get("origin"), origins) is None:
        return None
    wanted = headers.get("access-control-request-headers")
    max_age_s = services.config.preflight_max_age_s
    # Without a body Quart would create an iterator that needs an asyncio event loop.
    response = Response(b"", status=204, headers=preflight_headers(wanted, max_age_s))
    del response.headers["content-length"]  # not allowed in a 204
    return response


async def check_websocket(services: Services, routes: RouteTable) -> None:
    """Authenticate this WebSocket and make its tenant the current one.

    Raises:
      RequestError: 401 or 403.
    """
    check_host(websocket.headers.get("host"), services.config.host)
    services.objectives.enter(websocket.headers)
    connection = scope_of(websocket.scope).connection
    check_key(services, connection, websocket.headers, websocket.requested_subprotocols)
    origins = origins_here(services, routes.nearest(None, websocket.path))
    check_origin(websocket.headers.get("origin"), websocket.headers.get("host"), origins)
    enter_line(current_tenant().name or websocket.remote_addr or "")


def check_key(
    services: Services,
    connection: ClientConnection,
    headers: Headers,
    subprotocols: Iterable[str] = (),
) -> Tenant:
    """Authenticate a key, make its tenant the current one, and mark the connection as authenticated
    (unless the server has no keys).

    Raises:
      RequestError: 401 or 403.
    """
    key = sent_key(headers.get("authorization"), headers.get("x-api-key"), subprotocols)
    tenant = services.tenancy.tenant_of(key, time.time())
    enter_tenant(tenant)
    if not services.tenancy.is_open:
        connection.channel.note_key()
    return tenant


async def let_in(services: Services, asked: Request, route: Route | None) -> None:
    """Admit the HTTP request before its body is read: take a quota ticket and reserve room for its
    body.

    A client that is refused too often is delayed. A request that may join a stored answer is free
    and needs no ticket. If a peer or another host owns the answer, the owner takes the ticket.

    Raises:
      RequestError: 429 if the tenant has no quota left or too many requests in flight; 429 or 503
        if there is no room for its body; see also `claim_answer`.
    """
    scope, key = scope_of(asked.scope), current_line()
    entry, is_inner = scope.entry, scope.owner is not None
    enter_request(entry)
    try:
        if entry.may_come_back and route is not None and route.is_resumable:
            await claim_answer(services)
        if route is not None and route.cost != "nothing":
            _take_ticket(services, entry, route, is_inner=is_inner)
        if not is_inner:
            _take_room(services, entry, key)
    except RequestError:
        entry.decide(is_turned_away=True)
        if not is_inner:
            await _pause(services, entry, key)
        raise
    entry.decide(is_turned_away=False)


def _take_ticket(services: Services, entry: RequestEntry, route: Route, *, is_inner: bool) -> None:
    may_be_kept = entry.may_come_back and route.is_resumable
    if may_be_kept and (
        entry.owner_url or owner_elsewhere(services) is not None or has_answer(services)
    ):
        return
    uses_tokens = route.cost == "tokens"
    entry.ticket = services.quotas.enter(
        current_tenant(), uses_tokens=uses_tokens, is_charged=not is_inner
    )


def _take_room(services: Services, entry: RequestEntry, key: str) -> None:
    entry.hold = services.bodies.hold(key)
    if not entry.hold.grow_to(max(entry.expected_bytes, entry.received_bytes)):
        assert entry.hold.refusal is not None, "says why"
        raise entry.hold.refusal


async def _pause(services: Services, entry: RequestEntry, key: str) -> None:
    """Wait until a refusal is due, and for a body that is already arriving, so that its connection
    can be reused."""
    now = trio.current_time()
    answered_at = now + services.refusals.wait_s(key, now)
    if entry.expected_bytes <= services.config.door.small_body_bytes:
        with trio.move_on_after(BODY_UNDER_WAY_S):
            await entry.wait_whole()
    await trio.sleep_until(answered_at)
