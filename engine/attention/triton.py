"""The `triton` attention backend: paged attention kernels for NVIDIA GPUs.

The kernels (engine/gpu/attention_kernels.py) are imported when the backend is created, because
Triton comes with CUDA builds of torch only.

A decode row is cut into splits of a size that is fixed at start, so its sums have the same order in
every batch. The number of programs that share the splits affects speed only.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch

from triolet.errors import ConfigError

from .interface import PagedAttention
from .row_groups import group_rows
from .traits import TRITON

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import FlatStep
    from ..kv_pool import KVPool
    from .row_groups import RowGroup

TRAITS: Final = TRITON

MIN_SPLIT_TOKENS: Final = 256
"""Smallest split: below it, combining splits costs more than sharing the work gains."""
MAX_SPLITS: Final = 64
"""Most splits per row. Bounds the memory of partial sums; longer contexts get longer splits."""
BUSY_PROGRAMS: Final = 1024
"""Programs that keep a large GPU busy: several for each of an H100's 132 multiprocessors."""
KEY_TILE: Final = 64
PREFILL_LANES: Final = 64
"""Rows of a query tile: tokens times the heads that share keys."""
MIN_DOT_ROWS: Final = 16
"""Fewest rows of a product that tensor cores compute."""
LOG2_E: Final = math.log2(math.e)


def split_tokens_for(max_model_len: int) -> int:
    """Return the tokens per split: whole tiles, the same for every sequence."""
    needed = -(-max_model_len // MAX_SPLITS)
    return max(MIN_SPLIT_TOKENS, -(-needed // KEY_TILE) * KEY_TILE)


def programs_for(rows: int, num_kv_heads: int, max_splits: int) -> int:
    """Return how many programs share a row's splits."""
    return max(1, min(max_splits, BUSY_PROGRAMS // (rows * num_kv_heads)))


class TritonAttention(PagedAttention):
    """The backend for NVIDIA GPUs that needs no further package.

    Args:
      pool: the worker's KV pool.
      num_heads: number of query heads.
      max_model_len: longest sequence; sets the size of splits.

    Raises:
      ConfigError: Triton is not installed.
    """

    def __init__(self, pool: KVPool, num_heads: int, max_model_len: int) -> None:
        super().__init__(pool)
        try:
            self._kernels: Any = import_module("..gpu.attention_kernels", __package__)
        except ImportError as error:
            raise ConfigError(
                f"backend is 'triton', but Triton cannot be imported ({error}); install a CUDA "
                "build of torch, which brings it, or use backend 'sdpa'"
            ) from error
        layout = pool.layout
        self._num_heads = num_heads
        self._layout = layout
        self._split_tokens = split_tokens_for(max_model_len)
        self._max_splits = -(-max_model_len // self._split_tokens)
        group = num_heads // layout.num_kv_heads
        self._group = group
        self._padded_group = 1 << (group - 1).bit_length()
        self._tile_tokens = max(1, PREFILL_LANES // self._padded_group)
        self._decode: tuple[Tensor, Tensor, Tensor] | None = None
        self._chunks_in_tiles: tuple[Tensor, Tensor] | None = None
        self._covers_all = False

    def plan_rows(self, step: FlatStep) -> None:
        """See PagedAttention."""
        device = self._pool.device
        self._decode = None
        self._covers_all = False
        if (group := group_rows(step, is_decode=True)) is not None:
            arrays = (group.block_table, group.seq_lens, group.tokens.astype("int32"))
            table, seq_lens, tokens = (torch.from_numpy(array).to(device) for array in arrays)
            self._decode = (table, seq_lens, tokens)
        self.plan_chunks(group_rows(step, is_decode=False))

    def plan_decode(self, block_table: Tensor, seq_lens: Tensor) -> None:
        """See PagedAttention."""
        tokens = torch.arange(len(seq_lens), dtype=torch.int32, device=seq_lens.device)
        self._decode = (block_table, seq_lens, tokens)
        self._covers_all = True
        self.plan_chunks(None)

    def plan_chunks(self, group: RowGroup | None) -> None:
        """Prepare the prompt rows of a step; None if it has none."""
        self._chunks_in_tiles = None
        if group is not None:
            device = self._pool.device
            tiles = torch.from_numpy(group.tiles(self._tile_tokens)).to(device)
            self._chunks_in_tiles = (torch.from_numpy(group.block_table).to(device), tiles)

    def attend_stored(self, layer: int, query: Tensor) -> Tensor:
        """See PagedAttention."""
        cache = self._pool[:, layer]
        output = torch.empty_like(query) if self._covers_all else torch.zeros_like(query)
        if self._decode is not None:
            self._attend_decode(query, cache, output, *self._decode)
        self.attend_chunks(query, cache, output)
        return output

    @property
    def _scale(self) -> float:
        return LOG2_E / math.sqrt(self._layout.head_dim)

    def _precision(self) -> tuple[str, Any]:
        """Return the precision of products and the dtype of their operands.

        Triton's interpreter does not support bf16 arithmetic, so operands are widened there.
        """
        is_float32 = self._kernels.IS_INTERPRETED or self._layout.dtype is torch.float32
        language = self._kernels.tl
        return "ieee", language.float32 if is_float32 else language.bfloat16

    def _attend_decode(
        self,
        query: Tensor,
        cache: Tensor,
        output: Tensor,
        table: Tensor,
        seq_lens: Tensor,
        tokens: Tensor,
    ) -> None:
        rows, head_dim = len(seq_lens), self._layout.head_dim
        num_kv_heads = self._layout.num_kv_heads
        padded_dim = max(MIN_DOT_ROWS, 1 << (head_dim - 1).bit_length())
        shape = (rows, self._num_heads, self._max_splits)
        partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
        weights = torch.empty(*shape, 2, dtype=torch.float32, device=query.device)
        grid = (rows, num_kv_heads, programs_for(rows, num_kv_heads, self._max_splits))
        self._kernels.decode_splits_kernel[grid](
            query,
            cache[:, 0],
            cache[:, 1],
            table,
            seq_lens,
            tokens,
            partial,
            weights,
            self._scale,
            cache.stride(0),
            table.stride(0),
            num_kv_heads,
            self._group,
            max(MIN_DOT_ROWS, self._padded_group),
            head_dim,
            padded_dim,
            self._layout.block_size,
            self._split_tokens,
            self._max_splits,
            KEY_TILE,
            *self._precision(),
            num_warps=4,
            num_stages=3 if head_dim <= 128 else 2,
        )
        self._kernels.combine_splits_kernel[(rows, self._num_heads)](
            partial,
            weights,
            seq_lens,
            tokens,
            output,
            self._num_heads,
            head_dim,
            padded_dim,
            self._split_tokens,
            self._max_splits,
            num_warps=1,
        )

    def attend_chunks(self, query: Tensor, cache: Tensor, output: Tensor) -> None:
        """Attend the prompt rows of a step.

        Args:
          query: queries as in `attend_stored`.
          cache: keys and values of one layer.
          output: written at the prompt rows.
        """
        if self._chunks_in_tiles is None:
            return
        table, tiles = self._chunks_in_tiles
        head_dim = self._layout.head_dim
        lanes = self._tile_tokens * self._padded_group
        self._kernels.prefill_kernel[(len(tiles), self._layout.num_kv_heads)](
            query,
            cache[:, 0],
            cache[:, 1],
            table,
            tiles,
            output,
            self._scale,
            cache.stride(0),
            table.stride(0),
            self._layout.num_kv_heads,
            self._group,
            self._padded_group,
            head_dim,
            max(MIN_DOT_ROWS, 1 << (head_dim - 1).bit_length()),
            self._layout.block_size,
            self._tile_tokens,
            KEY_TILE,
            *self._precision(),
            num_warps=8 if lanes >= 128 else 4,
            num_stages=3 if head_dim <= 128 else 2,
        )
