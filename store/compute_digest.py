"""The compute digest of a version: of the part that decides the bits of KV and tokens.

Versions that differ in other layers only, as in a sampling default, have the same one: they share
workers, KV and golden tokens.
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
"""Weights; shape, tokenizer and special tokens; the format that weights are rounded to. A template
of its own is left out: workers get tokens, and another template only makes other prompts."""


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
            # Workers read the end tokens here, for grammars, and nothing else.
            ends = msgspec.json.decode(content, type=dict[str, object]).get("eos_token_id")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            ends = sampling.digest  # the end tokens are not known, so the whole file counts
    return digest_of(canonical({"layers": layers, "ends": ends}))
