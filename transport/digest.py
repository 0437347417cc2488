"""The digest that travels with each KV chunk: finds what memory and wires flip, not what an enemy
forges (that is CURVE's task)."""

from __future__ import annotations

import xxhash


class RunningDigest:
    """`payload_digest` of pieces that follow one another, each while it is still in the cache."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, piece: bytes | memoryview) -> None:
        """Add the next piece."""
        self._hash.update(piece)

    def digest(self) -> bytes:
        """Return the digest of all pieces together."""
        return self._hash.digest()


def payload_digest(payload: bytes | memoryview) -> bytes:
    """Return 16 bytes: xxh3-128, which costs less than copying the payload."""
    return xxhash.xxh3_128_digest(payload)
