"""Keys and digests that identify LoRA adapters on the wire, in fingerprints and in KV caches."""

from __future__ import annotations

from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

SHA256: Final = "sha256:"
CACHE_KEY_BYTES: Final = 32
"""Longer than a salt, so that no salt equals an adapter's key."""
_MARK: Final = ":adapters="


def digest_bytes(digest: str) -> bytes:
    """Return a digest as bytes for frames and rows; empty for no adapter."""
    return bytes.fromhex(digest.removeprefix(SHA256))


def adapters_mark(digests: Iterable[bytes]) -> str:
    """Return the suffix of a worker's fingerprint for its adapters; empty without adapters.

    Equal sets have equal suffixes, whatever the adapters are called.
    """
    listed = sorted(set(digests))
    return f"{_MARK}{sha256(b''.join(listed)).hexdigest()}" if listed else ""


def mark_of(fingerprint: str) -> str:
    """Return the adapter suffix of a fingerprint; empty if there is none."""
    before, mark, rest = fingerprint.rpartition(_MARK)
    return f"{mark}{rest}" if before else ""


def without_mark(fingerprint: str) -> str:
    """Return a fingerprint without its adapter suffix. Two workers with equal ones can exchange KV
    of sequences without an adapter, or with one that both have."""
    return fingerprint.removesuffix(mark_of(fingerprint))


def cache_key(salt: bytes, adapter: bytes) -> bytes:
    """Return the key under which a prompt's KV is cached: the salt itself without an adapter.

    Args:
      salt: salt of the request.
      adapter: digest of its adapter; empty for the base model.
    """
    if not adapter:
        return salt
    return blake2b(salt, key=adapter, digest_size=CACHE_KEY_BYTES).digest()
