"""Make API keys, and the digests that are stored instead of them."""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

KEY_PREFIX: Final = "sk-triolet-"
"""Lets scanners for leaked secrets find keys."""


def digest_of(key: str) -> str:
    """Return the digest that is stored for a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key() -> str:
    """Return a new random key."""
    return KEY_PREFIX + secrets.token_urlsafe(32)
