"""GET /openapi.json: the surface as a document, made from what really serves it.

Paths come from the URL map and bodies from the models that requests are read with, so neither can
drift; a row here says what a route is for and what it answers. A route without a row is described
by its path alone, and a test refuses that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from quart import Response

from ..api.anthropic.schema import CountRequest, MessagesRequest
from ..api.ollama.schema import (
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaShow,
)
from ..api.openai.embeddings import EmbeddingFields, RerankRequest, ScoreRequest
from ..api.openai.responses_schema import InputTokensRequest, ResponseRequest
from ..api.operations.probes import VERSION
from ..api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StrictModel,
    TokenizeRequest,
)
from ..jobs.endpoints import BatchFields
from .conditions import RELATIONS, add_conditions, add_limits, model_names
from .results import RESULTS, UPLOAD, ref

if TYPE_CHECKING:
    from quart_trio import QuartTrio
    from werkzeug.routing import Rule

    from ..api.services import Services

Document = dict[str, Any]
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
JSON_LINES: Final = "application/x-ndjson"
LINES: Final = "application/octet-stream"
PLAIN: Final = "text/plain"
PAGE: Final = "text/html"
FORM: Final = "multipart/form-data"
PATH: Final = "/openapi.json"
REFUSED: Final = "x-triolet-refused"
"""Beside a schema's properties: names that are known and not served."""
_TAGS: Final = (
    ("/v1/messages", "Messages (Anthropic)"),
    ("/v1/responses", "Responses (OpenAI)"),
    ("/v1/files", "Files and batches"),
    ("/v1/batches", "Files and batches"),
    ("/v1/usage", "Fleet"),
    ("/v1/models", "Models and tokens"),
    ("/v1/", "Text and vectors"),
    ("/v2/rerank", "Text and vectors"),
    ("/rerank", "Text and vectors"),
    ("/score", "Text and vectors"),
    ("/api/", "Ollama"),
    ("/tokenize", "Models and tokens"),
    ("/detokenize", "Models and tokens"),
    ("/fleet", "Fleet"),
    ("/metrics", "Fleet"),
    ("/load", "Fleet"),
    ("/health", "Process"),
    ("/ping", "Process"),
    ("/version", "Process"),
    ("/", "Pages"),
)
"""By how paths begin: under which heading they are shown. The first that fits counts."""
_VARIABLE: Final = re.compile(r"<(?:\w+:)?(\w+)>")


@dataclass(frozen=True, slots=True)
class DocumentedOperation:
    """What a route is for.

    Attributes:
      summary: one line.
      result: name of a component for JSON, or the media type of another answer.
      body: what its request is read with, or its schema; None where there is no body.
      streams: whether `stream: true` gets events.
      stream_media: the media type of a stream.
      media: of the request's body.
      status: of a good answer.
      error: name of a component for any other.
    """

    summary: str
    result: str
    body: type[StrictModel] | Document | None = None
    streams: bool = False
    media: str = JSON
    status: int = 200
    error: str = "Error"
    stream_media: str = EVENTS


def _ollama(summary: str, result: str, body: type[StrictModel]) -> DocumentedOperation:
    return DocumentedOperation(
        f"{summary[:-1]}, in Ollama's words.",
        result,
        body,
        streams=True,
        error="OllamaError",
        stream_media=JSON_LINES,
    )


OPERATIONS: Final[dict[str, DocumentedOperation]] = {
    "POST /v1/chat/completions": DocumentedOperation(
        "Answer a conversation.", "ChatCompletion", ChatRequest, streams=True
    ),
    "POST /v1/completions": DocumentedOperation(
        "Continue one or several prompts.", "Completion", CompletionRequest, streams=True
    ),
    "POST /v1/responses": DocumentedOperation(
        "Answer in the words of the Responses API; the same over a WebSocket at this path.",
        "Response",
        ResponseRequest,
        streams=True,
    ),
    "POST /v1/responses/input_tokens": DocumentedOperation(
        "Count the tokens of such a conversation.", "InputTokens", InputTokensRequest
    ),
    "GET /v1/responses/<response_id>": DocumentedOperation("Show a stored response.", "Response"),
    "DELETE /v1/responses/<response_id>": DocumentedOperation(
        "Forget a stored response.", "Anything"
    ),
    "GET /v1/responses/<response_id>/input_items": DocumentedOperation(
        "List the items of a stored response's request.", "List"
    ),
    "POST /v1/embeddings": DocumentedOperation(
        "Turn one or several inputs into vectors.", "Embeddings", EmbeddingFields
    ),
    "POST /v1/messages": DocumentedOperation(
        "Answer a conversation in the words of Anthropic's Messages API.",
        "MessagesAnswer",
        MessagesRequest,
        streams=True,
        error="MessagesError",
    ),
    "POST /v1/messages/count_tokens": DocumentedOperation(
        "Count the tokens of such a conversation.",
        "MessageTokens",
        CountRequest,
        error="MessagesError",
    ),
    **dict.fromkeys(
        ("POST /v1/rerank", "POST /v2/rerank", "POST /rerank"),
        DocumentedOperation(
            "Order documents by how near they are to a query.", "Ranking", RerankRequest
        ),
    ),
    **dict.fromkeys(
        ("POST /v1/score", "POST /score"),
        DocumentedOperation("How near one text is to others.", "Scores", ScoreRequest),
    ),
    "POST /api/chat": _ollama("Answer a conversation.", "OllamaChatAnswer", OllamaChat),
    "POST /api/generate": _ollama("Continue a prompt.", "OllamaText", OllamaGenerate),
    "POST /api/embed": DocumentedOperation(
        "Turn one or several inputs into vectors, in Ollama's words.",
        "OllamaVectors",
        OllamaEmbed,
        error="OllamaError",
    ),
    "POST /api/embeddings": DocumentedOperation(
        "Turn a prompt into a vector, in Ollama's older words.",
        "OllamaVector",
        OllamaEmbeddings,
        error="OllamaError",
    ),
    "GET /api/tags": DocumentedOperation(
        "List the served model.", "OllamaModels", error="OllamaError"
    ),
    "GET /api/ps": DocumentedOperation(
        "The same, as a loaded one.", "OllamaModels", error="OllamaError"
    ),
    "GET /api/version": DocumentedOperation(
        "Which release's API is spoken.", "OllamaVersion", error="OllamaError"
    ),
    "POST /api/show": DocumentedOperation(
        "Show the model.", "OllamaModel", OllamaShow, error="OllamaError"
    ),
    **dict.fromkeys(
        (
            "POST /api/pull",
            "POST /api/push",
            "POST /api/create",
            "POST /api/copy",
            "DELETE /api/delete",
        ),
        DocumentedOperation(
            "Always refused: the model is the server's.", "OllamaError", status=501
        ),
    ),
    "POST /v1/files": DocumentedOperation("Keep a file of requests.", "File", UPLOAD, media=FORM),
    "GET /v1/files": DocumentedOperation("List the files.", "List"),
    "GET /v1/files/<file_id>": DocumentedOperation("Show a file.", "File"),
    "DELETE /v1/files/<file_id>": DocumentedOperation("Forget a file.", "Anything"),
    "GET /v1/files/<file_id>/content": DocumentedOperation("What a file holds.", LINES),
    "POST /v1/batches": DocumentedOperation(
        "Answer a file of requests in the background.", "Batch", BatchFields
    ),
    "GET /v1/batches": DocumentedOperation("List the batches.", "List"),
    "GET /v1/batches/<batch_id>": DocumentedOperation("How far a batch is.", "Batch"),
    "POST /v1/batches/<batch_id>/cancel": DocumentedOperation("End a batch.", "Batch"),
    "GET /v1/models": DocumentedOperation("List the served model.", "ModelList"),
    "GET /v1/models/<path:name>": DocumentedOperation("Show one model.", "Model"),
    "GET /v1/usage": DocumentedOperation("What a tenant may use, and has used.", "TenantUsage"),
    "GET /fleet/usage": DocumentedOperation(
        "The same of all tenants, for operators.", "TenantUsageList"
    ),
    "GET /fleet/usage/own": DocumentedOperation(
        "The same of one server process.", "TenantUsageList"
    ),
    "POST /tokenize": DocumentedOperation(
        "Turn text or messages into token ids.", "Tokens", TokenizeRequest
    ),
    "POST /detokenize": DocumentedOperation("Turn token ids into text.", "Text", DetokenizeRequest),
    "GET /health/live": DocumentedOperation("Whether the process runs.", "Health"),
    "GET /ping": DocumentedOperation("The same, as some orchestrators call it.", "Health"),
    "GET /health/ready": DocumentedOperation("Whether a request sent now has workers.", "Health"),
    "GET /health": DocumentedOperation("The same, as some orchestrators call it.", "Health"),
    "GET /metrics": DocumentedOperation("Everything counted, for Prometheus.", PLAIN),
    "GET /metrics/own": DocumentedOperation("The same of one server process.", PLAIN),
    "GET /version": DocumentedOperation("Which release this is.", "Version"),
    "GET /load": DocumentedOperation("How much is going on.", "Load"),
    "GET /load/own": DocumentedOperation("The same of one server process.", "Load"),
    "GET /fleet/audit": DocumentedOperation(
        "Every block, lease and request, for operators.", "FleetAudit"
    ),
    "GET /fleet/audit/own": DocumentedOperation("The same of one server process.", "FleetAudit"),
    "GET /fleet/status": DocumentedOperation(
        "Workers, blocks, queue and latencies, for operators.", "FleetStatus"
    ),
    "GET /fleet/status/own": DocumentedOperation("The same of one server process.", "FleetStatus"),
    "GET /": DocumentedOperation("The chat page.", PAGE),
    "GET /dashboard": DocumentedOperation("A page that shows the fleet.", PAGE),
    "GET /docs": DocumentedOperation("A page that shows this document.", PAGE),
    "GET /static/<path:name>": DocumentedOperation("A file of the pages.", PAGE),
    f"GET {PATH}": DocumentedOperation("This document.", "Anything"),
}


class ServedDocument:
    """The document of one application, written once: that takes 50 ms, and needs no key.

    Args:
      app: with all its routes.
    """

    def __init__(self, app: QuartTrio) -> None:
        self._app = app
        self._of: tuple[tuple[tuple[tuple[str, ...], int], ...], bool] | None = None
        self._text = b""

    def answer(self, services: Services) -> Response:
        """Answer with the document."""
        models = tuple((model.names, model.fleet.max_model_len) for model in services.models)
        depends_on = models, services.tenancy.is_open
        if depends_on != self._of:
            self._text = msgspec.json.encode(openapi_document(self._app, services))
            self._of = depends_on
        return Response(self._text, content_type=JSON)


def openapi_document(app: QuartTrio, services: Services) -> Document:
    """Return the OpenAPI document of an application.

    Args:
      app: with all its routes.
      services: with the bounds.
    """
    schemas: dict[str, Any] = {}
    paths: dict[str, Document] = {}
    for rule in app.url_map.iter_rules():
        if not rule.websocket:
            method = next(iter((rule.methods or {"GET"}) - {"HEAD", "OPTIONS"})).lower()
            path = _VARIABLE.sub(r"{\1}", rule.rule)
            paths.setdefault(path, {})[method] = _operation(rule, schemas, services)
    assert not schemas.keys() & RESULTS.keys(), "a request and an answer share a name"
    add_limits(schemas, services)
    add_conditions(schemas, services)
    is_strict = services.config.strict_requests
    unlisted = "Fields that are not listed are " + (
        "refused by name" if is_strict else "ignored and named in x-triolet-ignored, or refused"
    )
    document: Document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Triolet",
            "version": VERSION,
            "description": f"{unlisted}. Also: {RELATIONS}.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": schemas | RESULTS},
    }
    if not services.tenancy.is_open:
        scheme = {"type": "http", "scheme": "bearer"}
        document["components"]["securitySchemes"] = {"key": scheme}
        document["security"] = [{"key": []}]
    return document


def _operation(rule: Rule, schemas: dict[str, Any], services: Services) -> Document:
    row = OPERATIONS.get(rule.endpoint, DocumentedOperation(rule.endpoint, "Anything"))
    shown: Document = {
        "summary": row.summary,
        "tags": [next(tag for begin, tag in _TAGS if rule.rule.startswith(begin))],
        "operationId": re.sub(r"\W+", "_", rule.endpoint).strip("_"),
        "responses": {str(row.status): _answer(row), "default": _error(row)},
    }
    names = _VARIABLE.findall(rule.rule)
    if names:
        shown["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _variable(rule, services)}
            for name in names
        ]
    if row.body is not None:
        body = row.body
        schema = body if isinstance(body, dict) else ref(_add_schema(body, schemas))
        shown["requestBody"] = {"required": True, "content": {row.media: {"schema": schema}}}
    return shown


def _variable(rule: Rule, services: Services) -> Document:
    """Return what a variable part of a path may be."""
    names = model_names(services) if rule.rule.startswith("/v1/models/") else []
    return {"type": "string", "enum": names} if names else {"type": "string", "minLength": 1}


def _answer(row: DocumentedOperation) -> Document:
    if row.result in RESULTS:
        content: Document = {JSON: {"schema": ref(row.result)}}
        if row.streams:
            content[row.stream_media] = {}
    elif row.summary.startswith("A file"):
        content = {media: {} for media in (PAGE, "text/javascript", "text/css", "image/svg+xml")}
    else:
        content = {row.result: {"schema": {"type": "string"}}}
    return {"description": row.summary, "content": content}


def _error(row: DocumentedOperation) -> Document:
    return {"description": "Why not.", "content": {JSON: {"schema": ref(row.error)}}}


def _add_schema(kind: type[StrictModel], schemas: dict[str, Any]) -> str:
    """Add a request's schema and those that it is made of. Returns its name."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    for name, part in schema.pop("$defs", {}).items():
        assert schemas.setdefault(name, part) == part, f"two models are named {name}"
    if schema.get("additionalProperties") is False:
        schema["properties"] |= _ignored_names(kind)
        schema[REFUSED] = _refused_names(kind)
    properties = schema["properties"]
    first = [name for name in ("model", *schema.get("required", ())) if name in properties]
    schema["properties"] = {name: properties[name] for name in first} | properties
    schemas[kind.__name__] = schema
    return kind.__name__


def _ignored_names(kind: type[StrictModel]) -> dict[str, Any]:
    """Return what is taken although no field is named so, because it has no effect."""
    return {
        name: {"description": "Accepted without effect."}
        for name in sorted(kind.ignored - set(kind.model_fields))
    }


def _refused_names(kind: type[StrictModel]) -> dict[str, Any]:
    """Return what would have an effect and is not served, with what it would be.

    Not among the properties: most are names of other servers, and a field of each would hide those
    that are served. Values that ask for nothing are taken all the same.
    """
    return {
        name: {"description": f"Not served: {what}.", "enum": [None, *harmless]}
        for name, (what, harmless) in kind.unsupported.items()
        if name not in kind.model_fields
    }
