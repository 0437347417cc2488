"""From what a client calls its part of the prefix cache to what workers call it."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from ..tenancy import current_tenant

SALT_BYTES: Final = 16


def salt_of(cache_salt: str | None) -> bytes:
    """Return a salt of one length for any text; empty, which is everybody's, for none.

    Where there are tenants, it is the tenant's own in either case: who asks the same as another
    finds nothing of theirs, whatever both call it. Every server of a fleet makes the same of it, so
    that they share what their clients share.
    """
    secret = current_tenant().secret
    if secret:
        words = b"\0" if cache_salt is None else b"\1" + cache_salt.encode()
        return blake2b(words, key=secret, digest_size=SALT_BYTES).digest()
    if cache_salt is None:
        return b""
    return blake2b(cache_salt.encode(), digest_size=SALT_BYTES).digest()
