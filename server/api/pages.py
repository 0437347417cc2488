"""GET /, /dashboard, /docs and /static: the pages, under a policy that lets them reach this server
only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Response, request

from .errors import http_error
from .static_files import content_security_policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .ports import Services
    from .static_files import StaticFile


def chat_page(files: Mapping[str, StaticFile], services: Services) -> Response:
    """Return the page itself."""
    return static_file(files, services, "index.html")


def dashboard(files: Mapping[str, StaticFile], services: Services) -> Response:
    """Return the page that shows the fleet. It holds no figures: it asks for them."""
    return static_file(files, services, "dashboard.html")


def api_page(files: Mapping[str, StaticFile], services: Services) -> Response:
    """Return the page that shows the OpenAPI document, and sends what its reader writes."""
    return static_file(files, services, "api.html")


def static_file(files: Mapping[str, StaticFile], services: Services, name: str) -> Response:
    """Return one of its files."""
    file = files.get(name)
    if file is None:
        raise http_error(404, "there is nothing here")
    host = request.headers.get("host") or f"{services.config.host}:{services.config.port}"
    headers = {
        "content-security-policy": content_security_policy(host),
        # Files change with the release: asked for again each time, sent only when they did.
        "cache-control": "no-cache",
        "etag": file.etag,
    }
    if request.headers.get("if-none-match") == file.etag:
        return Response(b"", 304, headers=headers)
    return Response(file.body, headers=headers, content_type=file.content_type)
