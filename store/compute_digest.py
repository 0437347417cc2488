"""The compute digest of a version: it covers everything that determines the bits of KV and tokens.

Versions that differ only in other layers, such as sampling defaults, have the same compute digest
and share workers, KV and golden tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from .manifest import (
    ENGINE_TYPE,
    MAX_DOCUMENT_BYTES,
    SAMPLING_TYPE,
    WEIGHT_CONFIG_TYPE,
    WEIGHT_TYPE,
    canonical,
    digest_of,
)

if TYPE_CHECKING:
    from .layout import ModelStore
    from .manifest import Manifest

COMPUTED_TYPES: Final = frozenset({WEIGHT_TYPE, WEIGHT_CONFIG_TYPE, ENGINE_TYPE})
"""Weights; shape, tokenizer and special tokens; the format that weights are rounded to. A custom
chat template does not count: workers get tokens, and a template only changes prompts."""


def compute_digest(store: ModelStore, manifest: Manifest) -> str:
    """Return the compute digest of a version.

    Raises:
      StoreError: its sampling defaults cannot be read from the store.
    """
    layers = [
        [one.media_type, one.file_name, one.digest]
        for one in manifest.layers
        if one.media_type in COMPUTED_TYPES
    ]
    ends: object = None
    if (sampling := manifest.layer(SAMPLING_TYPE)) is not None:
        content = store.read(sampling.digest, MAX_DOCUMENT_BYTES)
        try:
            # Workers read only the end tokens from this file, for grammars.
            ends = msgspec.json.decode(content, type=dict[str, object]).get("eos_token_id")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            ends = sampling.digest  # end tokens unknown: use the whole file
    return digest_of(canonical({"layers": layers, "ends": ends}))
