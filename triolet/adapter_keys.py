"""What names an adapter on the wire, in fingerprints and in caches of KV."""

from __future__ import annotations

from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

SHA256: Final = "sha256:"
CACHE_KEY_BYTES: Final = 32
"""More than a salt has, so that no salt is the key of an adapter."""
_MARK: Final = ":adapters="


def digest_bytes(digest: str) -> bytes:
    """Return a digest as frames and rows carry it; no bytes for no adapter."""
    return bytes.fromhex(digest.removeprefix(SHA256))


def adapters_mark(digests: Iterable[bytes]) -> str:
    """Return the end of the fingerprint of a worker with these adapters; empty for none.

    Equal sets have equal marks, whatever the adapters are called.
    """
    listed = sorted(set(digests))
    return f"{_MARK}{sha256(b''.join(listed)).hexdigest()}" if listed else ""


def mark_of(fingerprint: str) -> str:
    """Return that end of a fingerprint; empty if it names no adapters."""
    before, mark, rest = fingerprint.rpartition(_MARK)
    return f"{mark}{rest}" if before else ""


def without_mark(fingerprint: str) -> str:
    """Return a fingerprint without that end: what two workers need in common to exchange KV of
    sequences whose adapter both have, or that have none."""
    return fingerprint.removesuffix(mark_of(fingerprint))


def cache_key(salt: bytes, adapter: bytes) -> bytes:
    """Return under what KV of a prompt is found again: the salt itself without an adapter.

    Args:
      salt: of the request.
      adapter: digest of its adapter; empty for the base alone.
    """
    if not adapter:
        return salt
    return blake2b(salt, key=adapter, digest_size=CACHE_KEY_BYTES).digest()
