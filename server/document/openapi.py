"""GET /openapi.json: the OpenAPI document, generated from the route table.

Paths come from the served routes and bodies from the models that parse requests, so the document
cannot differ from what is served.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
from quart import Response

from ..api.operations.probes import VERSION
from ..api.route import JSON
from .conditions import RELATIONS, add_conditions, add_limits, model_names
from .results import RESULTS, ref

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..api.route import Dialect, DocumentedOperation, Route
    from ..api.schemas import StrictModel
    from ..api.services import Services

Document = dict[str, Any]
PAGE: Final = "text/html"
PATH: Final = "/openapi.json"
REFUSED: Final = "x-triolet-refused"
"""The extension that lists fields which are recognized but not supported."""
_VARIABLE: Final = re.compile(r"<(?:\w+:)?(\w+)>")
_STREAMS: Final[dict[Dialect, str]] = {
    "openai": "text/event-stream",
    "anthropic": "text/event-stream",
    "ollama": "application/x-ndjson",
}
_ERRORS: Final[dict[Dialect, str]] = {
    "openai": "Error",
    "anthropic": "MessagesError",
    "ollama": "OllamaError",
}


class ServedDocument:
    """The encoded document. It is built once, which takes 50 ms, and needs no API key."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes
        self._of: tuple[tuple[tuple[tuple[str, ...], int], ...], bool] | None = None
        self._text = b""

    def answer(self, services: Services) -> Response:
        """Return the document as a response."""
        models = tuple((model.names, model.fleet.max_model_len) for model in services.models)
        depends_on = models, services.tenancy.is_open
        if depends_on != self._of:
            self._text = msgspec.json.encode(openapi_document(self._routes, services))
            self._of = depends_on
        return Response(self._text, content_type=JSON)


def openapi_document(routes: Sequence[Route], services: Services) -> Document:
    """Return the OpenAPI document of the routes, with this server's limits."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Document] = {}
    for route in routes:
        if route.entry is not None:
            path = _VARIABLE.sub(r"{\1}", route.path)
            operation = _operation(route, route.entry, schemas, services)
            paths.setdefault(path, {})[route.method.lower()] = operation
    assert not schemas.keys() & RESULTS.keys(), "a request and a response share a name"
    add_limits(schemas, services)
    add_conditions(schemas, services)
    is_strict = services.config.strict_requests
    unlisted = "Unlisted fields are " + (
        "refused" if is_strict else "refused, or ignored and named in x-triolet-ignored"
    )
    document: Document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Triolet",
            "version": VERSION,
            "description": f"{unlisted}. Further conditions: {RELATIONS}.",
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


def _operation(
    route: Route, entry: DocumentedOperation, schemas: dict[str, Any], services: Services
) -> Document:
    shown: Document = {
        "summary": entry.summary,
        "tags": [entry.heading],
        "operationId": re.sub(r"\W+", "_", route.endpoint).strip("_"),
        "responses": {str(entry.status): _answer(route, entry), "default": _error(route, entry)},
    }
    names = _VARIABLE.findall(route.path)
    if names:
        shown["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _variable(route, services)}
            for name in names
        ]
    if entry.body is not None:
        body = entry.body
        schema = body if isinstance(body, dict) else ref(_add_schema(body, schemas))
        shown["requestBody"] = {"required": True, "content": {entry.media: {"schema": schema}}}
    return shown


def _variable(route: Route, services: Services) -> Document:
    """Return the schema of a path variable."""
    names = model_names(services) if route.path.startswith("/v1/models/") else []
    return {"type": "string", "enum": names} if names else {"type": "string", "minLength": 1}


def _answer(route: Route, entry: DocumentedOperation) -> Document:
    if entry.result in RESULTS:
        content: Document = {JSON: {"schema": ref(entry.result)}}
        if route.streams:
            content[_STREAMS[route.dialect]] = {}
    elif entry.summary.startswith("A static file"):
        content = {media: {} for media in (PAGE, "text/javascript", "text/css", "image/svg+xml")}
    else:
        content = {entry.result: {"schema": {"type": "string"}}}
    return {"description": entry.summary, "content": content}


def _error(route: Route, entry: DocumentedOperation) -> Document:
    schema = ref(entry.error or _ERRORS[route.dialect])
    return {"description": "Error.", "content": {JSON: {"schema": schema}}}


def _add_schema(kind: type[StrictModel], schemas: dict[str, Any]) -> str:
    """Add a request's schema and its parts. Return its name."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    for name, part in schema.pop("$defs", {}).items():
        assert schemas.setdefault(name, part) == part, f"two request models are named {name}"
    if schema.get("additionalProperties") is False:
        schema["properties"] |= _ignored_names(kind)
        schema[REFUSED] = _refused_names(kind)
    properties = schema["properties"]
    first = [name for name in ("model", *schema.get("required", ())) if name in properties]
    schema["properties"] = {name: properties[name] for name in first} | properties
    schemas[kind.__name__] = schema
    return kind.__name__


def _ignored_names(kind: type[StrictModel]) -> dict[str, Any]:
    """Return fields that are accepted without a model field because they have no effect."""
    return {
        name: {"description": "Accepted, but has no effect."}
        for name in sorted(kind.ignored - set(kind.model_fields))
    }


def _refused_names(kind: type[StrictModel]) -> dict[str, Any]:
    """Return the recognized fields that are not supported, each with a description of its effect.

    They are not listed as properties because most come from other servers and would hide the
    supported ones. Values that have no effect are accepted.
    """
    return {
        name: {"description": f"Not supported: {what}.", "enum": [None, *harmless]}
        for name, (what, harmless) in kind.unsupported.items()
        if name not in kind.model_fields
    }
