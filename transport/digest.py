"""What travels with each KV chunk so that its receiver may trust it.

The digest finds what memory and wires flip. What an enemy forges CURVE finds, or, where KV travels
without it, the MAC: by a key that only the attempt's server, prefill and decode worker know.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import xxhash

from .codec import encode
from .frames import KvChunk, KvManifest

if TYPE_CHECKING:
    from triolet.ids import AttemptKey

MAC_BYTES: Final = 16
KV_KEY_BYTES: Final = 32

F = TypeVar("F", KvChunk, KvManifest)


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


def kv_key(secret: bytes, attempt: AttemptKey) -> bytes:
    """Return the key of one attempt's KV; it tells nothing of any other attempt's.

    Args:
      secret: of the server, 32 random bytes.
      attempt: that the KV is of.
    """
    name = attempt.request_id + attempt.attempt.to_bytes(8, "big")
    return blake2b(name, key=secret, digest_size=KV_KEY_BYTES).digest()


def sealed(frame: F, key: bytes, payload: bytes | memoryview = b"") -> F:
    """Return the frame with its MAC: of where its bytes belong, for whom, and of the bytes."""
    return msgspec.structs.replace(frame, mac=_mac(frame, key, payload))


def is_authentic(
    frame: KvChunk | KvManifest, key: bytes, payload: bytes | memoryview = b""
) -> bool:
    """Return whether this very frame and payload were sealed with the key."""
    return bool(key) and hmac.compare_digest(frame.mac, _mac(frame, key, payload))


def _mac(frame: KvChunk | KvManifest, key: bytes, payload: bytes | memoryview) -> bytes:
    bare = msgspec.structs.replace(frame, mac=b"")
    if isinstance(bare, KvChunk):
        # Where the sender's memory is shared, `shared` says how the bytes came, not what they are.
        bare = msgspec.structs.replace(bare, shared=None)
    head = encode(bare)
    # Twice as fast as keyed BLAKE2b where the CPU has instructions for SHA-256.
    mac = hmac.new(key, len(head).to_bytes(4, "big") + head, "sha256")
    mac.update(payload)
    return mac.digest()[:MAC_BYTES]
