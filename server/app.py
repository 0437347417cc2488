"""The application: which route leads where, and what every answer has in common.

Authorisation is per route: the checks run for every route of the map, whatever its path looked like
on the wire.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio
from quart import Response, has_request_context, request, websocket
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from triolet.errors import RequestError, server_error

from .api.absent import advice_on
from .api.access import check_request, check_websocket, origins_here, page_headers
from .api.anthropic.messages import MESSAGES, count_message_tokens, create_message, message_error
from .api.body import current_scope, shown_request_id
from .api.errors import CODES, echo, error_body, error_headers, http_error
from .api.limits import rate_headers
from .api.ollama import chat as ollama_chat
from .api.ollama import models as ollama_models
from .api.ollama.chat import ollama_error
from .api.openai.chat import chat_completions, completions
from .api.openai.embeddings import embeddings, rerank, score
from .api.openai.models import detokenize, list_models, show_model, tokenize
from .api.openai.responses import count_input_tokens, create_response
from .api.openai.responses_socket import responses_socket
from .api.openai.stored_responses import delete_response, list_input_items, show_response
from .api.operations.fleet_status import (
    FLEET_USAGE,
    OWN_AUDIT,
    OWN_STATUS,
    OWN_USAGE,
    fleet_audit,
    fleet_status,
    fleet_usage,
    own_audit,
    own_status,
    own_usage,
    server_usage,
)
from .api.operations.fleet_status import PATH as STATUS
from .api.operations.pages import api_page, chat_page, dashboard, read_static_files, static_file
from .api.operations.probes import (
    OWN_LOAD,
    OWN_METRICS,
    READY_PATHS,
    live,
    load,
    metrics,
    own_load,
    own_metrics,
    ready,
    version,
)
from .api.proxying import is_proxied, proxy_to_owner
from .api.request_scope import scope_of
from .document.openapi import PATH as OPENAPI
from .document.openapi import ServedDocument
from .edge.quart import PatchedHTTPConnection, PatchedQuart
from .jobs.endpoints import (
    cancel_batch,
    create_batch,
    delete_file,
    file_content,
    keeps_no_files,
    list_batches,
    list_files,
    show_batch,
    show_file,
    upload_file,
)
from .tenants.tenancy import current_tenant

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeAlias

    from .api.services import Services
    from .jobs.storage import Storage

    View: TypeAlias = Callable[..., Awaitable[Response] | Response]
    Route: TypeAlias = tuple[str, str, View]
    """Method, path, view."""

log = structlog.get_logger(__name__)

RESPONSES: Final = "/v1/responses"
OLLAMA: Final = "/api/"
HEADERS: Final = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}

ANSWERS: Final[tuple[Route, ...]] = (
    ("POST", "/v1/chat/completions", proxy_to_owner(chat_completions)),
    ("POST", "/v1/completions", proxy_to_owner(completions)),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", RESPONSES, proxy_to_owner(create_response)),
    ("POST", f"{RESPONSES}/input_tokens", count_input_tokens),
    ("GET", f"{RESPONSES}/<response_id>", show_response),
    ("DELETE", f"{RESPONSES}/<response_id>", delete_response),
    ("GET", f"{RESPONSES}/<response_id>/input_items", list_input_items),
    ("POST", MESSAGES, proxy_to_owner(create_message)),
    ("POST", f"{MESSAGES}/count_tokens", count_message_tokens),
)
STORED: Final[tuple[Route, ...]] = (
    ("POST", "/v1/files", upload_file),
    ("GET", "/v1/files", list_files),
    ("GET", "/v1/files/<file_id>", show_file),
    ("DELETE", "/v1/files/<file_id>", delete_file),
    ("GET", "/v1/files/<file_id>/content", file_content),
    ("GET", "/v1/batches", list_batches),
    ("GET", "/v1/batches/<batch_id>", show_batch),
    ("POST", "/v1/batches/<batch_id>/cancel", cancel_batch),
)
"""Files and batches, where they are kept."""
OTHERS: Final[tuple[Route, ...]] = (
    *(("POST", path, rerank) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    *(("POST", path, score) for path in ("/v1/score", "/score")),
    ("POST", "/api/chat", ollama_chat.chat),
    ("POST", "/api/generate", ollama_chat.generate),
    ("POST", "/api/embed", ollama_chat.embed_inputs),
    ("POST", "/api/embeddings", ollama_chat.embed_prompt),
    ("GET", "/api/tags", ollama_models.list_tags),
    ("GET", "/api/ps", ollama_models.list_running),
    ("GET", "/api/version", ollama_models.show_version),
    ("POST", "/api/show", ollama_models.show),
    *(
        ("POST", f"{OLLAMA}{action}", ollama_models.refuse)
        for action in ("pull", "push", "create", "copy")
    ),
    ("DELETE", "/api/delete", ollama_models.refuse),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/<path:name>", show_model),
    ("GET", "/v1/usage", own_usage),
    ("GET", FLEET_USAGE, fleet_usage),
    ("GET", OWN_USAGE, server_usage),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    *(("GET", path, live) for path in ("/health/live", "/ping")),
    *(("GET", path, ready) for path in READY_PATHS),
    ("GET", "/metrics", metrics),
    ("GET", "/version", version),
    ("GET", "/load", load),
    ("GET", OWN_AUDIT, own_audit),
    ("GET", OWN_METRICS, own_metrics),
    ("GET", OWN_LOAD, own_load),
    ("GET", "/fleet/audit", fleet_audit),
    ("GET", OWN_STATUS, own_status),
    ("GET", STATUS, fleet_status),
)


def build_app(services: Services, storage: Storage | None = None) -> PatchedQuart:
    """Return the application, ready to be served.

    Args:
      services: what routes work with.
      storage: files and batches; None where none are kept.
    """
    app = PatchedQuart("triolet", static_folder=None, template_folder=None)
    app.asgi_http_class = PatchedHTTPConnection
    # A redirect to a tidier path would be a second way to each route.
    app.url_map.strict_slashes = True
    app.url_map.merge_slashes = False
    app.url_map.redirect_defaults = False
    app.config["MAX_CONTENT_LENGTH"] = services.config.max_body_bytes
    app.config["SMALL_BODY_BYTES"] = services.config.door.small_body_bytes
    app.config["BODY_TIMEOUT"] = None
    app.config["PROPAGATE_EXCEPTIONS"] = False
    _add_routes(app, services, storage)
    app.before_request(partial(check_request, services))
    app.before_websocket(partial(check_websocket, services))
    app.after_request(partial(_finish, services))
    app.register_error_handler(Exception, partial(_on_error, services))
    return app


def _add_routes(app: PatchedQuart, services: Services, storage: Storage | None) -> None:
    files = read_static_files()
    stored: list[Route] = [
        (method, path, keeps_no_files if storage is None else partial(view, storage))
        for method, path, view in STORED
    ]
    of_app: tuple[Route, ...] = (
        ("GET", OPENAPI, ServedDocument(app).answer),
        ("GET", "/", partial(chat_page, files)),
        ("GET", "/dashboard", partial(dashboard, files)),
        ("GET", "/docs", partial(api_page, files)),
        ("GET", "/static/<path:name>", partial(static_file, files)),
    )
    batches: Route = ("POST", "/v1/batches", partial(create_batch, storage))
    for method, path, view in (*ANSWERS, batches, *stored, *OTHERS, *of_app):
        app.add_url_rule(
            path,
            endpoint=f"{method} {path}",
            view_func=_with_services(view, services),
            methods=[method],
            provide_automatic_options=False,
        )
    app.add_websocket(RESPONSES, endpoint="WS", view_func=partial(responses_socket, services))


def _with_services(
    view: Callable[..., Awaitable[Response] | Response], services: Services
) -> Callable[..., Awaitable[Response]]:
    async def call(**arguments: str) -> Response:
        answer = view(services, **arguments)
        return answer if isinstance(answer, Response) else await answer

    return call


async def _finish(services: Services, response: Response) -> Response:
    elapsed_s = trio.current_time() - current_scope().began_at
    if not is_proxied():  # the server that passed it on has counted it
        services.metrics.http.request(request.endpoint or "none")
    response.headers.update(HEADERS)
    response.headers.update(current_scope().headers)
    response.headers["x-request-id"] = shown_request_id()
    if _is_of_messages():
        response.headers["request-id"] = shown_request_id()
    if (cache := current_scope().cache) is not None:
        response.headers.update(cache.headers)
    response.headers["openai-processing-ms"] = str(round(elapsed_s * 1000))
    for name, value in rate_headers(services.quotas).items():
        response.headers.setdefault(name, value)  # the owner of a kept answer has set them already
    if origins := origins_here(services, request.path):
        own = tuple(response.headers.keys())
        response.headers.update(page_headers(request.headers.get("origin"), origins, own))
    if services.state.is_leaving:
        # The next request needs a connection to another process.
        response.headers["connection"] = "close"
    return response


async def _on_error(services: Services, error: Exception) -> Response:
    shown = _shown(error)
    headers = error_headers(shown)
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = ", ".join(sorted(error.valid_methods or ()))
    is_cut = has_request_context() and current_scope().entry.is_cut
    if shown.status in {408, 413} or is_cut or services.state.is_draining:
        # The rest of the body is not read, or the process ends: nothing more will be answered.
        headers["connection"] = "close"
    if not has_request_context():
        # A refused handshake passes no `_finish`.
        headers["x-request-id"] = secrets.token_hex(16)
    else:
        current_scope().is_crowded_out = shown.is_crowded_out
        current_scope().entry.leave(shown)
    if shown.status != 503 or not has_request_context() or request.path not in READY_PATHS:
        services.metrics.http.error(shown.status, is_of_queue=shown.is_of_queue)
    _note_refusal(services, shown, headers.get("x-request-id"))
    body = error_body(shown)
    if _is_of_messages():
        body = msgspec.json.encode(message_error(shown, shown_request_id()))
    elif has_request_context() and request.path.startswith(OLLAMA):
        body = msgspec.json.encode(ollama_error(shown))
    return Response(body, shown.status, headers=headers, content_type="application/json")


def _note_refusal(services: Services, error: RequestError, request_id: str | None) -> None:
    """Log a refusal; a line of a batch tells its batch."""
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


def _is_of_messages() -> bool:
    """Whether the request is one of Anthropic's clients, which have their own form of errors."""
    return has_request_context() and request.path.startswith(MESSAGES)


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
        also = ", and WebSockets" if has_request_context() and path == RESPONSES else ""
        return f"this path takes {', '.join(sorted(error.valid_methods or ()))}{also}"
    if error.code == 404:
        return f"there is nothing at {echo(path)}: {advice_on(path)}"
    return f"{echo(path)}: {error.name}"
