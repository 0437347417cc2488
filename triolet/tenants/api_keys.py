"""How an API key is made, and what is stored of it: never the key."""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

KEY_PREFIX: Final = "sk-triolet-"
"""So that scanners for leaked secrets find keys."""


def digest_of(key: str) -> str:
    """Return what is stored of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key() -> str:
    """Return a key that nobody can guess."""
    return KEY_PREFIX + secrets.token_urlsafe(32)
