"""A digest of the code that packs weights, so that no release maps a snapshot of another one."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Final

import xxhash

_PACKAGES: Final = ("engine", "store/gguf")
_DEQUANTIZER: Final = "gguf"


def code_digest(root: Path) -> str:
    """Return a digest of the code under a folder that reads and packs weights."""
    digest = xxhash.xxh3_128(version(_DEQUANTIZER).encode())
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


CODE_DIGEST: Final = code_digest(Path(__file__).resolve().parents[2])
"""Computed at import: if files are replaced, a running process still packs with the old code.
Takes some milliseconds, which a template process spends once for all of its forks."""
