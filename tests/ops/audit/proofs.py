"""An independent verifier of inclusion proofs (RFC 9162, 2.1.3.2) for the tests of the audit log.
It shares no code with the log."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


def root_of(leaf: bytes, index: int, size: int, path: list[bytes]) -> bytes:
    """Return the root computed from a leaf and its path."""
    assert index < size
    at, last, node = index, size - 1, leaf
    for sibling in path:
        assert last > 0, "the path is too long"
        if at & 1 or at == last:
            node = hashlib.sha256(b"\x01" + sibling + node).digest()
            while not at & 1 and at:
                at, last = at >> 1, last >> 1
        else:
            node = hashlib.sha256(b"\x01" + node + sibling).digest()
        at, last = at >> 1, last >> 1
    assert last == 0, "the path is too short"
    return node


def check_proof(text: str) -> dict[str, Any]:
    """Check the output of `triolet audit prove` and return the proven entry."""
    proof = json.loads(text)
    body = proof["head"]["body"]
    signed = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(body["key"]))
    key.verify(bytes.fromhex(proof["head"]["signature"]), signed)
    leaf = hashlib.sha256(b"\x00" + proof["entry"].encode()).digest()
    path = [bytes.fromhex(node) for node in proof["path"]]
    assert root_of(leaf, proof["index"], body["size"], path).hex() == body["root"]
    entry: dict[str, Any] = json.loads(proof["entry"])
    assert entry["index"] == proof["index"]
    return entry
