"""Serves the web pages from files read at start. A path is only looked up in this map, so a client
cannot reach any other file."""

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
"""Files of other types are not served."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A static file.

    Attributes:
      body: its bytes.
      content_type: content type, from the file's suffix.
      etag: changes with the bytes.
    """

    body: bytes
    content_type: str
    etag: str


def read_static_files(root: Path = STATIC_DIR) -> dict[str, StaticFile]:
    """Return the pages' files by their path below `root`, with forward slashes."""
    files = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix in TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            name = path.relative_to(root).as_posix()
            files[name] = StaticFile(body, TYPES[path.suffix], etag)
    return files


def content_security_policy(host: str) -> str:
    """Return the content security policy of the pages: own files and own server only.

    Args:
      host: validated name and port that the browser used. Named explicitly because older browsers
        do not include WebSockets to the page's origin in 'self'.
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
    """Return the chat page."""
    return static_file(files, services, "index.html")


def dashboard(files: Mapping[str, StaticFile], services: Services) -> Response:
    """Return the dashboard. It loads its data separately."""
    return static_file(files, services, "dashboard.html")


def api_page(files: Mapping[str, StaticFile], services: Services) -> Response:
    """Return the API documentation page, which shows the OpenAPI document and can send requests."""
    return static_file(files, services, "api.html")


def static_file(files: Mapping[str, StaticFile], services: Services, name: str) -> Response:
    """Return a static file of the pages."""
    file = files.get(name)
    if file is None:
        raise http_error(404, f"there is no static file {echo(name)}")
    host = request.headers.get("host") or f"{services.config.host}:{services.config.port}"
    headers = {
        "content-security-policy": content_security_policy(host),
        # Files change with a release: browsers revalidate each time and download only changes.
        "cache-control": "no-cache",
        "etag": file.etag,
    }
    if request.headers.get("if-none-match") == file.etag:
        return Response(b"", 304, headers=headers)
    return Response(file.body, headers=headers, content_type=file.content_type)
