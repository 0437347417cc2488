"""Attention backends by their names in the config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from triolet.config import require

from . import flash, sdpa, triton

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..kv_pool import KVPool
    from .interface import AttentionBackend
    from .traits import BackendTraits

TRAITS: Final = {traits.name: traits for traits in (sdpa.TRAITS, flash.TRAITS, triton.TRAITS)}
_CREATE: Final[dict[str, Callable[[KVPool, int, int], AttentionBackend]]] = {
    sdpa.TRAITS.name: sdpa.SdpaAttention,
    flash.TRAITS.name: flash.FlashAttention,
    triton.TRAITS.name: triton.TritonAttention,
}


def backend_traits(name: str) -> BackendTraits:
    """Return a backend's traits.

    Raises:
      ConfigError: no backend has this name.
    """
    require(name in TRAITS, "backend", name, ", ".join(sorted(TRAITS)))
    return TRAITS[name]


def create_attention(
    name: str, pool: KVPool, num_heads: int, max_model_len: int
) -> AttentionBackend:
    """Create an attention backend over a pool.

    Raises:
      ConfigError: no backend has this name, or its package is not installed.
    """
    backend_traits(name)
    return _CREATE[name](pool, num_heads, max_model_len)
