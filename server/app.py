"""The Quart application: builds it from the route table and adds the headers, errors and access
checks that all responses share.

Access checks run per route after routing, so the path's spelling on the wire cannot bypass them.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog
import trio
from quart import Response, has_request_context, request, websocket
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from triolet.errors import RequestError, server_error

from .api.absent import advice_on
from .api.access import check_request, check_websocket, origins_here, page_headers
from .api.anthropic.messages import message_error
from .api.body import current_scope, shown_request_id
from .api.errors import CODES, echo, error_body, error_headers, http_error
from .api.limits import rate_headers
from .api.ollama.chat import ollama_error
from .api.operations.pages import read_static_files
from .api.operations.probes import ready
from .api.proxying import is_proxied, proxy_to_owner
from .api.request_scope import scope_of
from .api.route import WS
from .api.versions import note_refused
from .document.openapi import ServedDocument
from .edge.quart import PatchedHTTPConnection, PatchedQuart
from .jobs.endpoints import keeps_no_files
from .routes import ROUTES
from .tenants.tenancy import current_tenant

if TYPE_CHECKING:
    from collections.abc import Callable

    from .api.route import Route, RoutePart
    from .api.services import Services
    from .jobs.storage import Storage

log = structlog.get_logger(__name__)

HEADERS: Final = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


def build_app(services: Services, storage: Storage | None = None) -> PatchedQuart:
    """Return the application, ready to serve.

    Args:
      services: the parts that routes use.
      storage: files and batches; None if they are disabled.
    """
    app = PatchedQuart("triolet", static_folder=None, template_folder=None)
    app.asgi_http_class = PatchedHTTPConnection
    # A redirect to the path without a slash would be a second way to reach each route.
    app.url_map.strict_slashes = True
    app.url_map.merge_slashes = False
    app.url_map.redirect_defaults = False
    app.config["MAX_CONTENT_LENGTH"] = services.config.max_body_bytes
    app.config["SMALL_BODY_BYTES"] = services.config.door.small_body_bytes
    app.config["BODY_TIMEOUT"] = None
    app.config["PROPAGATE_EXCEPTIONS"] = False
    _add_routes(app, services, storage)
    app.before_request(partial(check_request, services, ROUTES))
    app.before_websocket(partial(check_websocket, services, ROUTES))
    app.after_request(partial(_finish, services))
    app.register_error_handler(Exception, partial(_on_error, services))
    return app


def _add_routes(app: PatchedQuart, services: Services, storage: Storage | None) -> None:
    parts: dict[RoutePart, object] = {
        "storage": storage,
        "storage or none": storage,
        "page files": read_static_files(),
        "document": ServedDocument(ROUTES.rows),
    }
    for route in ROUTES.rows:
        view: Callable[..., Any] = route.view
        if route.part == "storage" and storage is None:
            view = keeps_no_files
        elif route.part is not None:
            view = partial(view, parts[route.part])
        if route.is_resumable and (services.peers or services.hosts):
            view = proxy_to_owner(view)
        if route.method == WS:
            app.add_websocket(
                route.path, endpoint=route.endpoint, view_func=partial(view, services)
            )
        else:
            app.add_url_rule(
                route.path,
                endpoint=route.endpoint,
                view_func=partial(view, services),
                methods=[route.method],
                provide_automatic_options=False,
            )


def _nearest_route() -> Route:
    return ROUTES.nearest(request.endpoint, request.path)


async def _finish(services: Services, response: Response) -> Response:
    elapsed_s = trio.current_time() - current_scope().began_at
    if not is_proxied(services):  # counted by the server that proxied it
        services.metrics.http.request(request.endpoint or "none")
    response.headers.update(HEADERS)
    response.headers.update(current_scope().headers)
    response.headers["x-request-id"] = shown_request_id()
    route = _nearest_route()
    if route.dialect == "anthropic":
        response.headers["request-id"] = shown_request_id()
    if (cache := current_scope().cache) is not None:
        response.headers.update(cache.headers)
    response.headers["openai-processing-ms"] = str(round(elapsed_s * 1000))
    for name, value in rate_headers(services.quotas).items():
        response.headers.setdefault(name, value)  # the stored response's owner may have set them
    if origins := origins_here(services, route):
        own = tuple(response.headers.keys())
        response.headers.update(page_headers(request.headers.get("origin"), origins, own))
    if services.state.is_leaving:
        # The client's next request must go to another process, over a new connection.
        response.headers["connection"] = "close"
    return response


async def _on_error(services: Services, error: Exception) -> Response:
    shown = _shown(error)
    headers = error_headers(shown)
    route = _nearest_route() if has_request_context() else None
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = ", ".join(sorted(error.valid_methods or ()))
    is_cut = has_request_context() and current_scope().entry.is_cut
    if shown.status in {408, 413} or is_cut or services.state.is_draining:
        # The rest of the body is not read, or the process ends: no further response can follow.
        headers["connection"] = "close"
    if not has_request_context():
        # A refused WebSocket handshake skips `_finish`.
        headers["x-request-id"] = secrets.token_hex(16)
    else:
        note_refused(current_scope(), shown, services)
        current_scope().is_crowded_out = shown.is_crowded_out
        current_scope().entry.leave(shown)
    if shown.status != 503 or route is None or route.view is not ready:
        services.metrics.http.error(shown.status, is_of_queue=shown.is_of_queue)
    _note_refusal(services, shown, headers.get("x-request-id"))
    body = error_body(shown)
    if route is not None and route.dialect == "anthropic":
        body = msgspec.json.encode(message_error(shown, shown_request_id()))
    elif route is not None and route.dialect == "ollama":
        body = msgspec.json.encode(ollama_error(shown))
    return Response(body, shown.status, headers=headers, content_type="application/json")


def _note_refusal(services: Services, error: RequestError, request_id: str | None) -> None:
    """Log a refused request, with the batch id if it is a line of a batch."""
    asked = request if has_request_context() else websocket
    if scope_of(asked.scope).owner is not None:
        return
    services.refusal_log.tell(
        error,
        trio.current_time(),
        request_id=request_id or shown_request_id(),
        method=asked.method if has_request_context() else "WS",
        path=asked.path,
        client=asked.remote_addr,
        tenant=current_tenant().name,
    )


def _shown(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, HTTPException) and error.code in CODES:
        return http_error(error.code, _advice(error))
    request_id = shown_request_id() if has_request_context() else None
    log.error("request_failed", request_id=request_id, exc_info=error)
    return server_error()


def _advice(error: HTTPException) -> str:
    path = (request if has_request_context() else websocket).path
    if isinstance(error, MethodNotAllowed):
        also = ", and WebSockets" if has_request_context() and ROUTES.find(f"{WS} {path}") else ""
        return f"this path accepts {', '.join(sorted(error.valid_methods or ()))}{also}"
    if error.code == 404:
        return f"there is nothing at {echo(path)}: {advice_on(path)}"
    return f"{echo(path)}: {error.name}"
