"""From what a client calls its part of the prefix cache to what workers call it. Pure."""

from __future__ import annotations

from hashlib import blake2b

SALT_BYTES = 16


def salt_of(cache_salt: str | None) -> bytes:
    """Return a salt of one length for any text; empty, which is everybody's, for none.

    Every server of a fleet makes the same of it, so that they share what their clients share.
    """
    if cache_salt is None:
        return b""
    return blake2b(cache_salt.encode(), digest_size=SALT_BYTES).digest()
