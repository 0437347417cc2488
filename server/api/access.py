"""Who may ask what: the one gate before every route.

Closed by default: a route that nobody thought of needs an operator's key. Knows routes by their
endpoints and tenants by their roles; what a request is about, it does not know.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from quart import request, websocket

from triolet.loopback import is_loopback
from triolet.tenants import TenantRole

from ..tenancy import enter_tenant
from .claims import enter_batch
from .errors import http_error
from .keys import sent_key
from .live import OWNER_KEY, own_peer
from .origins import check_host, check_origin
from .passing_on import is_passed_on

if TYPE_CHECKING:
    from collections.abc import Iterable

    from werkzeug.datastructures import Headers

    from triolet.tenants import Tenant

    from .ports import Services

SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
OPEN_ENDPOINTS: Final = frozenset(
    {
        "GET /health/live",
        "GET /health/ready",
        "GET /health",
        "GET /ping",
        "GET /",
        "GET /dashboard",
        "GET /static/<path:name>",
        "GET /openapi.json",
    }
)
"""All that is answered without a key where there are keys: whether the process is well, and pages
that ask for a key themselves. Everything else, also what is not there, is closed."""
USER_PATHS: Final = ("/v1/", "/tokenize", "/detokenize", "/version")
"""How the paths begin that every tenant's keys open; the rest is for operators."""


def is_for_users(endpoint: str | None) -> bool:
    """Return whether every tenant may ask for a route; also for what is not there."""
    return endpoint is None or endpoint.partition(" ")[2].startswith(USER_PATHS)


async def check_request(services: Services) -> None:
    """Let the running task serve whoever sent this request.

    Raises:
      RequestError: 401 or 403.
    """
    _check_host(services, request.headers.get("host"))
    owner = request.scope["state"].get(OWNER_KEY)
    if owner is not None:
        # From within: nothing that a client sends gets there.
        enter_batch()
        enter_tenant(services.tenancy.tenant_named(owner))
    elif is_passed_on() or (
        request.endpoint not in OPEN_ENDPOINTS and not own_peer(request.scope).is_unix
    ):
        tenant = check_key(services, request.headers)
        _note_key(services, request.scope)
        if tenant.role is not TenantRole.OPERATOR and not is_for_users(request.endpoint):
            raise http_error(403, "this needs the key of a tenant whose role is operator")
    if request.method not in SAFE_METHODS:
        check_origin(request.headers.get("origin"), request.headers.get("host"))


async def check_websocket(services: Services) -> None:
    """Let the running task serve whoever opened this WebSocket.

    Raises:
      RequestError: 401 or 403.
    """
    _check_host(services, websocket.headers.get("host"))
    check_key(services, websocket.headers, websocket.requested_subprotocols)
    _note_key(services, websocket.scope)
    check_origin(websocket.headers.get("origin"), websocket.headers.get("host"))


def check_key(services: Services, headers: Headers, subprotocols: Iterable[str] = ()) -> Tenant:
    """Let the running task serve the tenant whose key was sent, as that tenant is now.

    Raises:
      RequestError: 401 or 403.
    """
    key = sent_key(headers.get("authorization"), headers.get("x-api-key"), subprotocols)
    tenant = services.tenancy.tenant_of(key, time.time())
    enter_tenant(tenant)
    return tenant


def _note_key(services: Services, scope: object) -> None:
    """Note that a connection is of a tenant; where there are no keys it is nobody's."""
    if not services.tenancy.is_open:
        own_peer(scope).on_key()


def _check_host(services: Services, host: str | None) -> None:
    own = services.config.host
    check_host(host, is_loopback=is_loopback(own), own_name=own)
