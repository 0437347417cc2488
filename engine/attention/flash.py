"""The `flash` attention backend: flash-attn's paged kernel for prompts. NVIDIA only.

Decode rows are computed as in the `triton` backend. flash-attn is imported when the backend is
created. Written against flash-attn 2.8.3, which needs only the last dimension of its cache to be
contiguous, so a layer's slice of the block-major pool is passed as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch

from triolet.errors import ConfigError

from .traits import FLASH
from .triton import TritonAttention

if TYPE_CHECKING:
    from torch import Tensor

    from ..kv_pool import KVPool
    from .row_groups import RowGroup

TRAITS: Final = FLASH

MIN_CHUNK_LEN: Final = 2
"""Smallest `max_seqlen_q` passed to the kernel, which needs an upper bound only. At 1 the kernel
switches to decode, where the number of splits depends on the batch's size."""


@dataclass(frozen=True, slots=True)
class _DeviceGroup:
    """A RowGroup on the device, and the two numbers that the kernel needs on the host."""

    tokens: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    key_start_loc: Tensor
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(cls, group: RowGroup, device: torch.device) -> _DeviceGroup:
        return cls(
            torch.from_numpy(group.tokens).to(device),
            torch.from_numpy(group.block_table).to(device),
            torch.from_numpy(group.query_start_loc).to(device),
            torch.from_numpy(group.key_start_loc).to(device),
            group.max_query_len,
            group.max_seq_len,
        )


class FlashAttention(TritonAttention):
    """The backend for NVIDIA GPUs with flash-attn.

    Args:
      pool: the worker's KV pool.
      num_heads: number of query heads.
      max_model_len: longest sequence; sets the size of splits.

    Raises:
      ConfigError: flash-attn or Triton is not installed.
    """

    def __init__(self, pool: KVPool, num_heads: int, max_model_len: int) -> None:
        try:
            self._flash_attn: Any = import_module("flash_attn")
        except ImportError as error:
            raise ConfigError(
                f"backend is 'flash', but flash-attn cannot be imported ({error}); install the "
                "extra `flash` (pip install 'triolet[flash]'), or use backend 'triton' or 'sdpa'"
            ) from error
        super().__init__(pool, num_heads, max_model_len)
        self._chunks: _DeviceGroup | None = None

    def plan_chunks(self, group: RowGroup | None) -> None:
        """See TritonAttention."""
        self._chunks = None if group is None else _DeviceGroup.of(group, self._pool.device)

    def attend_chunks(self, query: Tensor, cache: Tensor, output: Tensor) -> None:
        """See TritonAttention."""
        if (group := self._chunks) is None:
            return
        output[group.tokens] = self._flash_attn.flash_attn_varlen_func(
            query[group.tokens],
            cache[:, 0],
            cache[:, 1],
            cu_seqlens_q=group.query_start_loc,
            cu_seqlens_k=group.key_start_loc,
            max_seqlen_q=max(MIN_CHUNK_LEN, group.max_query_len),
            max_seqlen_k=group.max_seq_len,
            softmax_scale=1.0 / math.sqrt(self._layout.head_dim),
            causal=True,
            block_table=group.block_table,
        )
