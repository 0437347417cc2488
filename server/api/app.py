"""The application: which route leads where, and what every answer has in common.

Knows Quart; the work is done by the modules that the routes name. Authorisation is per route: the
checks run for every route of the map, whatever its path looked like on the wire.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio
from quart import Response, has_request_context, request, websocket
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from triolet.errors import RequestError, server_error
from triolet.loopback import is_loopback

from ..edge.cures_quart import CuredHTTPConnection, CuredQuart
from .chat import chat_completions
from .completions import completions
from .errors import CODES, error_body, error_headers, http_error
from .fleet_audit import OWN_AUDIT, fleet_audit, own_audit
from .intake import live_request, shown_request_id
from .models import detokenize, list_models, show_model, tokenize
from .origins import check_host, check_origin
from .pages import chat_page, static_file
from .probes import (
    OWN_LOAD,
    OWN_METRICS,
    live,
    load,
    metrics,
    own_load,
    own_metrics,
    ready,
    version,
)
from .responses_socket import responses_socket
from .static_files import read_static_files

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .ports import Services

log = structlog.get_logger(__name__)

CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
NOT_FOUND: Final = "there is nothing at this path; the API is below /v1, the chat page at /"
SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
HEADERS: Final = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


def build_app(services: Services) -> CuredQuart:
    """Return the application, ready to be served."""
    app = CuredQuart("triolet", static_folder=None, template_folder=None)
    app.asgi_http_class = CuredHTTPConnection
    # A redirect to a tidier path would be a second way to each route.
    app.url_map.strict_slashes = True
    app.url_map.merge_slashes = False
    app.url_map.redirect_defaults = False
    app.config["MAX_CONTENT_LENGTH"] = services.config.max_body_bytes
    # Quart would cut off every stream after a minute; ours end by their deadlines.
    app.config["RESPONSE_TIMEOUT"] = None
    app.config["BODY_TIMEOUT"] = None
    app.config["PROPAGATE_EXCEPTIONS"] = False
    _add_routes(app, services)
    app.before_request(partial(_check_request, services))
    app.before_websocket(partial(_check_websocket, services))
    app.after_request(partial(_finish, services))
    app.register_error_handler(Exception, partial(_on_error, services))
    return app


def _add_routes(app: CuredQuart, services: Services) -> None:
    def add(method: str, path: str, view: Callable[..., Awaitable[Response] | Response]) -> None:
        app.add_url_rule(
            path,
            endpoint=f"{method} {path}",
            view_func=_with_services(view, services),
            methods=[method],
            provide_automatic_options=False,
        )

    add("POST", CHAT, chat_completions)
    add("POST", "/v1/completions", completions)
    add("GET", "/v1/models", list_models)
    add("GET", "/v1/models/<path:name>", show_model)
    add("POST", "/tokenize", tokenize)
    add("POST", "/detokenize", detokenize)
    for path in ("/health/live", "/ping"):
        add("GET", path, live)
    for path in ("/health/ready", "/health"):
        add("GET", path, ready)
    add("GET", "/metrics", metrics)
    add("GET", "/version", version)
    add("GET", "/load", load)
    add("GET", OWN_AUDIT, own_audit)
    add("GET", OWN_METRICS, own_metrics)
    add("GET", OWN_LOAD, own_load)
    add("GET", "/fleet/audit", fleet_audit)
    files = read_static_files()
    add("GET", "/", partial(chat_page, files))
    add("GET", "/static/<path:name>", partial(static_file, files))
    app.add_websocket(RESPONSES, endpoint="WS", view_func=partial(responses_socket, services))


def _with_services(
    view: Callable[..., Awaitable[Response] | Response], services: Services
) -> Callable[..., Awaitable[Response]]:
    async def call(**arguments: str) -> Response:
        answer = view(services, **arguments)
        return answer if isinstance(answer, Response) else await answer

    return call


async def _check_request(services: Services) -> None:
    _check_who_asks(services, request.headers.get("host"))
    if request.method not in SAFE_METHODS:
        check_origin(request.headers.get("origin"), request.headers.get("host"))


async def _check_websocket(services: Services) -> None:
    _check_who_asks(services, websocket.headers.get("host"))
    check_origin(websocket.headers.get("origin"), websocket.headers.get("host"))


def _check_who_asks(services: Services, host: str | None) -> None:
    own = services.config.host
    check_host(host, is_loopback=is_loopback(own), own_name=own)


async def _finish(services: Services, response: Response) -> Response:
    elapsed_s = trio.current_time() - live_request().began_at
    response.headers.update(HEADERS)
    response.headers["x-request-id"] = shown_request_id()
    response.headers["openai-processing-ms"] = str(round(elapsed_s * 1000))
    if services.lifecycle.is_leaving:
        # The next request needs a connection to somebody else.
        response.headers["connection"] = "close"
    return response


async def _on_error(services: Services, error: Exception) -> Response:
    shown = _shown(error)
    headers = error_headers(shown)
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = ", ".join(sorted(error.valid_methods or ()))
    if shown.status in {408, 413} or services.lifecycle.is_draining:
        # The rest of the body is not read, or the process ends: nothing more will be answered.
        headers["connection"] = "close"
    if not has_request_context():
        # A refused handshake passes no `_finish`.
        headers["x-request-id"] = secrets.token_hex(16)
    services.metrics.http_error(shown.status)
    return Response(
        error_body(shown), shown.status, headers=headers, content_type="application/json"
    )


def _shown(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, HTTPException) and error.code in CODES:
        return http_error(error.code, _advice(error))
    request_id = shown_request_id() if has_request_context() else None
    log.error("request failed", request_id=request_id, exc_info=error)
    return server_error()


def _advice(error: HTTPException) -> str:
    if has_request_context() and request.path == RESPONSES:
        return f"this path is a WebSocket; over HTTP, POST to {CHAT}"
    if isinstance(error, MethodNotAllowed):
        return f"this path takes {', '.join(sorted(error.valid_methods or ()))}"
    return NOT_FOUND if error.code == 404 else error.name
