"""The chat page's files, read once at start. Knows names and types; joins no path with a client's
words: what is not in the map does not exist."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

STATIC_DIR: Final = Path(__file__).parents[1] / "static"
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
