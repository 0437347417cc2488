"""What reads checkpoints and orders packed weights: Triolet's own code, told from that of other
releases by a digest, so that none maps what another has packed."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Final

import xxhash

_PACKAGES: Final = ("engine", "store/gguf")
_DEQUANTIZER: Final = "gguf"


def code_digest(root: Path) -> str:
    """Return a digest of the code below a folder that weights pass through, and of what it uses."""
    digest = xxhash.xxh3_128(version(_DEQUANTIZER).encode())
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


CODE_DIGEST: Final = code_digest(Path(__file__).resolve().parents[2])
"""Taken when the code is imported: a process that runs on while its files are exchanged packs as
the old ones said. Some milliseconds, which a template spends for all of its forks."""
