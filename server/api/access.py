"""Access of requests: keys, origins, hosts, and what a request takes before its body is read.

A page on any site can send requests to localhost (cross-site request forgery), and a name that its
owner resolves to 127.0.0.1 makes that page's origin look like ours (DNS rebinding). So behind a
loopback address only known host names are answered, and what a browser says comes from another
origin is refused unless that origin is allowed (CORS). No answer lets a browser send cookies along:
keys travel in headers that pages set.
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
from .limits import enter_batch, enter_request
from .proxying import is_proxied, owner_elsewhere
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
"""What a preflight permits that names no headers it wants to send."""
SHOWN_HEADERS: Final = ("x-", "request-id", "retry-after", "openai-processing-ms", "age", "www-")
"""How the names of those headers begin that a page's script may read, beside the few that the
standard lets it."""
_ASKED_FIRST: Final = frozenset({"application/json", "multipart/form-data"})
"""Types of bodies for which a page of another origin gets a 403: a browser asks before it sends
the first, and the second is that of files, which no other type can replace."""
_OTHER_SITES: Final = frozenset({"cross-site", "same-site"})
"""What a browser calls the page that asks, beside its Origin, if it is not of this origin."""
LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


def check_host(host: str | None, own_name: str) -> None:
    """Raise the RequestError for a Host header that is none of ours.

    Args:
      host: the header, None where a client of HTTP/1.0 sent none: no browser does.
      own_name: the configured host. If other machines can reach it, a proxy or another name may
        rightly stand in front, and rebinding gains nothing over asking directly.
    """
    if host is None or host == "":
        return
    match = _HOST.fullmatch(host)
    if match is None:
        raise http_error(400, f"the Host header {echo(host)} is malformed")
    name = match["name"].lower()
    is_ours = name in LOCAL_NAMES or name.strip("[]") == own_name.lower()
    if not is_ours and is_loopback(own_name):
        raise http_error(403, f"this server does not answer as {echo(name)}; use localhost")


def check_origin(
    origin: str | None, host: str | None, allowed: Collection[str], media: str | None = None
) -> None:
    """Raise the RequestError for a request that a web page of another origin caused.

    Programs send JSON under any content-type; only a browser sends an Origin. A page of another
    origin can send a body without a preflight if its type is not application/json, so it is asked
    for that first, and then for permission.

    Args:
      origin: the Origin header; None from anything but a browser.
      host: the Host header.
      allowed: other origins that may ask.
      media: the type of the body, empty where the request does not say; None without a body.
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
    """Return the Origin; `null` for a page of another site if its browser hides the Origin."""
    is_foreign = headers.get("sec-fetch-site") in _OTHER_SITES
    return headers.get("origin", "null" if is_foreign else None)


def _is_own(origin: str, host: str | None) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and parts.netloc.lower() == (host or "").lower() != ""


def shown_origin(origin: str | None, allowed: Collection[str]) -> str | None:
    """Return what `Access-Control-Allow-Origin` says to an origin; None for one not allowed."""
    if origin is None or not allowed:
        return None
    if ANY_ORIGIN in allowed:
        return ANY_ORIGIN
    return origin if origin in allowed else None


def page_headers(
    origin: str | None, allowed: Collection[str], names: Iterable[str]
) -> dict[str, str]:
    """Return the headers by which a browser shows an answer to a page of another origin.

    Args:
      origin: the Origin header of the request.
      allowed: origins that may ask; there are some.
      names: of the answer's own headers.
    """
    # Also without an Origin: what a cache keeps of that answer is not for pages.
    headers = {"vary": "Origin"}
    shown = shown_origin(origin, allowed)
    if shown is not None:
        exposed = sorted({name.lower() for name in names if name.lower().startswith(SHOWN_HEADERS)})
        headers["access-control-allow-origin"] = shown
        headers["access-control-expose-headers"] = ", ".join(exposed)
    return headers


def preflight_headers(wanted: str | None, max_age_s: int) -> dict[str, str]:
    """Return what the answer to a preflight of an allowed origin permits, beside `page_headers`.

    Args:
      wanted: names of headers that the page wants to send. Any may be: a header proves nothing of
        its sender here but its key.
      max_age_s: how long the answer holds.
    """
    is_list = wanted is not None and _HEADER_NAMES.fullmatch(wanted.strip()) is not None
    return {
        "access-control-allow-methods": ", ".join(METHODS),
        "access-control-allow-headers": wanted.strip() if wanted and is_list else USUAL_HEADERS,
        "access-control-max-age": str(max_age_s),
    }


SUBPROTOCOL: Final = "triolet"
"""What a browser's WebSocket speaks beside the key: a browser can set no header there, and an
address, with whatever is in it, ends up in logs and histories."""
KEY_SUBPROTOCOL: Final = "triolet-key."
"""Before the key in base64url, in Sec-WebSocket-Protocol."""


def sent_key(
    authorization: str | None, x_api_key: str | None, subprotocols: Iterable[str] = ()
) -> str | None:
    """Return the key that a request carries, None for none.

    Args:
      authorization: the header; OpenAI's clients send `Bearer KEY`.
      x_api_key: the header; Anthropic's clients send the key there.
      subprotocols: what a browser's WebSocket offers.
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
"""For a short body of a refused request that left its client together with the head."""


def origins_here(services: Services, route: Route) -> Sequence[str]:
    """Return the origins with pages that may use a route."""
    return services.config.allow_origins if route.is_for_pages else ()


async def check_request(services: Services, routes: RouteTable) -> Response | None:
    """Let the running task serve this request's tenant, and read its body.

    Any tenant's key opens a path or method that is not there.

    Returns:
      The answer to a browser's preflight, which carries no key; None for any other request.

    Raises:
      RequestError: 401 or 403; 429 or 503 before the body is read.
    """
    # The proxy looks the request up at each access, which is a microsecond of everybody's way.
    asked: Request = request._get_current_object()  # type: ignore[attr-defined]
    headers = asked.headers
    check_host(headers.get("host"), services.config.host)
    route = routes.find(asked.endpoint)
    permission = Permission.USER if route is None else route.permission
    origins = origins_here(services, routes.nearest(asked.endpoint, asked.path))
    preflight = _answer_preflight(services, asked, origins)
    scope = scope_of(asked.scope)
    owner = scope.owner
    if owner is not None:
        # From within: nothing that a client sends gets there.
        enter_batch()
        enter_tenant(services.tenancy.tenant_named(owner))
        enter_line(f"batches of {owner}")
    elif preflight is None and (
        (permission is not Permission.NONE and not scope.connection.is_unix) or is_proxied()
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
    """Return what an allowed origin's page may do; None if this is not what is asked."""
    headers = asked.headers
    if asked.method != "OPTIONS" or "access-control-request-method" not in headers:
        return None
    if shown_origin(headers.get("origin"), origins) is None:
        return None
    wanted = headers.get("access-control-request-headers")
    max_age_s = services.config.preflight_max_age_s
    # Without a body Quart would iterate over none, for which it wants an event loop of asyncio.
    response = Response(b"", status=204, headers=preflight_headers(wanted, max_age_s))
    del response.headers["content-length"]  # not allowed in a 204
    return response


async def check_websocket(services: Services, routes: RouteTable) -> None:
    """Let the running task serve the client that opened this WebSocket.

    Raises:
      RequestError: 401 or 403.
    """
    check_host(websocket.headers.get("host"), services.config.host)
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
    """Let the running task serve the tenant of the key that was sent, as that tenant is now. The
    connection is of a tenant from then on; where there are no keys there is none.

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
    """Decide on the HTTP request before its body is read: take its ticket, and room for its body.

    Refusals of one client beyond a rate wait for their answer. A request that may join a kept
    answer needs no ticket: that costs nothing. Nor does one that a peer owns: the peer asks.

    Raises:
      RequestError: 429, its tenant has nothing left or as much under way as it may; 429 or 503,
        there is no room for its body.
    """
    scope, key = scope_of(asked.scope), current_line()
    entry, is_inner = scope.entry, scope.owner is not None
    enter_request(entry)
    try:
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
    if may_be_kept and (owner_elsewhere(services) is not None or has_answer(services)):
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
    """Wait until a refusal is due, and for a body that is on its way already: its connection can
    then be used again."""
    now = trio.current_time()
    answered_at = now + services.refusals.wait_s(key, now)
    if entry.expected_bytes <= services.config.door.small_body_bytes:
        with trio.move_on_after(BODY_UNDER_WAY_S):
            await entry.wait_whole()
    await trio.sleep_until(answered_at)
