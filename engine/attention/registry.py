"""Which backends there are. A backend's packages are imported only when it is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from triolet.config import require

from . import sdpa

if TYPE_CHECKING:
    from ..kv_pool import KVPool
    from .interface import AttentionBackend, BackendTraits

BACKENDS: Final = {sdpa.TRAITS.name: sdpa.TRAITS}


def backend_traits(name: str) -> BackendTraits:
    """Return what a backend can do.

    Raises:
      ConfigError: there is no such backend.
    """
    require(name in BACKENDS, "backend", name, ", ".join(sorted(BACKENDS)))
    return BACKENDS[name]


def create_attention(
    name: str, pool: KVPool, num_heads: int, max_model_len: int
) -> AttentionBackend:
    """Return a backend over a pool."""
    return sdpa.SdpaAttention(pool, num_heads, max_model_len)
