"""How an API key is made, and what is stored of it: never the key."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Final

from .errors import ConfigError

KEY_PREFIX: Final = "sk-triolet-"
"""So that scanners for leaked secrets find keys."""
KEY_LINE: Final = re.compile(r"(?P<tenant>[A-Za-z0-9._-]{1,64})\s+sha256:(?P<digest>[0-9a-f]{64})")
"""One key in an operator's file."""


def digest_of(key: str) -> str:
    """Return what is stored of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key() -> str:
    """Return a key that nobody can guess."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def key_line(tenant: str, key: str) -> str:
    """Return the line of the operator's file that lets a key in.

    Raises:
      ConfigError: the tenant's name cannot stand there.
    """
    line = f"{tenant} sha256:{digest_of(key)}"
    if KEY_LINE.fullmatch(line) is None:
        raise ConfigError(
            f"{tenant!r} is no name of a tenant: up to 64 letters, digits, dots, - and _"
        )
    return line
