"""Attention by flash-attn's paged kernels, which read blocks in place: NVIDIA only.

The package is imported when the backend is created, not before. Decode rows go through the split-KV
kernel, prompt chunks through the variable-length one, each in one call per layer. Written against
flash-attn 2.8.3; only the last dimension of its cache must be contiguous, so a layer's slice of the
block-major pool serves as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch

from triolet.errors import ConfigError

from .interface import PagedAttention
from .row_groups import group_rows
from .traits import FLASH

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import FlatStep
    from ..kv_pool import KVPool
    from .row_groups import RowGroup

TRAITS: Final = FLASH

SPLIT_TOKENS: Final = 512
"""Tokens of one split while there are few splits: below it combining them costs more than sharing
the work gains."""
MAX_SPLITS: Final = 32
"""Bounds the memory of unfinished sums, splits * rows * query heads * head_dim fp32 numbers; longer
contexts get longer splits. The kernel takes 128 at most."""
MIN_CHUNK_LEN: Final = 2
"""Least `max_seqlen_q` that the kernel for chunks is told; an upper bound is all that it needs. At
1 it changes over to a decode kernel, with a number of splits that depends on the batch's size."""


def splits_for(max_model_len: int) -> int:
    """Return into how many splits the kernel cuts the block table of a decode step.

    The kernel cuts the width of the table, not the length of a row: with one number of splits and
    one width for every step a row's bits depend on its own sequence alone.
    """
    return min(MAX_SPLITS, -(-max_model_len // SPLIT_TOKENS))


@dataclass(frozen=True, slots=True)
class _DeviceGroup:
    """A RowGroup on the device, and the two numbers that its kernel wants on the host."""

    tokens: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    key_start_loc: Tensor
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(cls, group: RowGroup, device: torch.device) -> _DeviceGroup:
        return cls(
            torch.from_numpy(group.tokens).to(device),
            torch.from_numpy(group.block_table).to(device),
            torch.from_numpy(group.seq_lens).to(device),
            torch.from_numpy(group.query_start_loc).to(device),
            torch.from_numpy(group.key_start_loc).to(device),
            group.max_query_len,
            group.max_seq_len,
        )


class FlashAttention(PagedAttention):
    """The backend for NVIDIA GPUs with flash-attn.

    Args:
      pool: the worker's KV.
      max_model_len: the longest sequence; fixes the splits and the width of block tables.

    Raises:
      ConfigError: flash-attn is not installed.
    """

    def __init__(self, pool: KVPool, max_model_len: int) -> None:
        super().__init__(pool)
        try:
            self._kernels: Any = import_module("flash_attn")
        except ImportError as error:
            raise ConfigError(
                f"backend is 'flash', but flash-attn cannot be imported ({error}); install the "
                "extra `flash` (pip install 'triolet[flash]'), or use backend 'triton' or 'sdpa'"
            ) from error
        self._scale = 1.0 / math.sqrt(pool.layout.head_dim)
        self._num_splits = splits_for(max_model_len)
        self._max_blocks = -(-max_model_len // pool.layout.block_size)
        self._decode: _DeviceGroup | None = None
        self._prefill: _DeviceGroup | None = None
        self._rows: tuple[Tensor, Tensor] | None = None

    def plan_rows(self, step: FlatStep) -> None:
        """See PagedAttention."""
        device = self._pool.device
        decode = group_rows(step, is_decode=True, width=self._max_blocks)
        prefill = group_rows(step, is_decode=False)
        self._rows = None
        self._decode = _DeviceGroup.of(decode, device) if decode else None
        self._prefill = _DeviceGroup.of(prefill, device) if prefill else None

    def plan_decode(self, block_table: Tensor, seq_lens: Tensor) -> None:
        """See PagedAttention."""
        self._rows = (block_table, seq_lens)

    def attend_stored(self, layer: int, query: Tensor) -> Tensor:
        """See PagedAttention."""
        key_cache, value_cache = self._pool[:, layer, 0], self._pool[:, layer, 1]
        if self._rows is not None:
            return self._attend_decode(query, key_cache, value_cache, *self._rows)
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        if (group := self._decode) is not None:
            output[group.tokens] = self._attend_decode(
                query[group.tokens], key_cache, value_cache, group.block_table, group.seq_lens
            )
        if (group := self._prefill) is not None:
            output[group.tokens] = self._kernels.flash_attn_varlen_func(
                query[group.tokens],
                key_cache,
                value_cache,
                cu_seqlens_q=group.query_start_loc,
                cu_seqlens_k=group.key_start_loc,
                max_seqlen_q=max(MIN_CHUNK_LEN, group.max_query_len),
                max_seqlen_k=group.max_seq_len,
                softmax_scale=self._scale,
                causal=True,
                block_table=group.block_table,
            )
        return output

    def _attend_decode(
        self, query: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, seq_lens: Tensor
    ) -> Tensor:
        attended: Tensor = self._kernels.flash_attn_with_kvcache(
            query.unsqueeze(1),
            keys,
            values,
            cache_seqlens=seq_lens,
            block_table=block_table,
            softmax_scale=self._scale,
            causal=True,
            num_splits=self._num_splits,
        )
        return attended.squeeze(1)
