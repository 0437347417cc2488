"""The chat page's files, read once at start. No path is joined with
a client's words: what is not in the map does not exist."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quart import Response, request

from ..errors import echo, http_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..services import Services


STATIC_DIR: Final = Path(__file__).parents[2] / "static"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
"""A file of another type is not served: the map holds what the page is made of and nothing else."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file.

    Attributes:
      body: its bytes.
      content_type: by its suffix.
      etag: changes with the bytes.
    """

    body: bytes
    content_type: str
    etag: str


def read_static_files(root: Path = STATIC_DIR) -> dict[str, StaticFile]:
    """Return the page's files by their path below `root`, with forward slashes."""
    files = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix in TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            name = path.relative_to(root).as_posix()
            files[name] = StaticFile(body, TYPES[path.suffix], etag)
    return files


def content_security_policy(host: str) -> str:
    """Return the policy under which the page runs: its own files, its own server, nothing else.

    Args:
      host: name and port that the browser used; already checked. Named because older browsers do
        not count WebSockets to the page's own origin as 'self'.
    """
    return "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' data:",
            f"connect-src 'self' ws://{host} wss://{host}",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


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
        raise http_error(404, f"there is nothing at /static/{echo(name)}")
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
