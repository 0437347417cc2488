"""GET /openapi.json: the route table as a document.

Paths come from the rows that the application serves and bodies from the models that requests are
read with, so neither can drift.
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
"""Beside a schema's properties: names that are known and not served."""
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
    """The document of some routes, written once: that takes 50 ms, and needs no key."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes
        self._of: tuple[tuple[tuple[tuple[str, ...], int], ...], bool] | None = None
        self._text = b""

    def answer(self, services: Services) -> Response:
        """Answer with the document."""
        models = tuple((model.names, model.fleet.max_model_len) for model in services.models)
        depends_on = models, services.tenancy.is_open
        if depends_on != self._of:
            self._text = msgspec.json.encode(openapi_document(self._routes, services))
            self._of = depends_on
        return Response(self._text, content_type=JSON)


def openapi_document(routes: Sequence[Route], services: Services) -> Document:
    """Return the OpenAPI document of some routes, with the bounds of `services`."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Document] = {}
    for route in routes:
        if route.entry is not None:
            path = _VARIABLE.sub(r"{\1}", route.path)
            operation = _operation(route, route.entry, schemas, services)
            paths.setdefault(path, {})[route.method.lower()] = operation
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
    """Return what a variable part of a path may be."""
    names = model_names(services) if route.path.startswith("/v1/models/") else []
    return {"type": "string", "enum": names} if names else {"type": "string", "minLength": 1}


def _answer(route: Route, entry: DocumentedOperation) -> Document:
    if entry.result in RESULTS:
        content: Document = {JSON: {"schema": ref(entry.result)}}
        if route.streams:
            content[_STREAMS[route.dialect]] = {}
    elif entry.summary.startswith("A file"):
        content = {media: {} for media in (PAGE, "text/javascript", "text/css", "image/svg+xml")}
    else:
        content = {entry.result: {"schema": {"type": "string"}}}
    return {"description": entry.summary, "content": content}


def _error(route: Route, entry: DocumentedOperation) -> Document:
    schema = ref(entry.error or _ERRORS[route.dialect])
    return {"description": "Why not.", "content": {JSON: {"schema": schema}}}


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
