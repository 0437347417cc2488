"""The `sdpa` attention backend: torch's scaled_dot_product_attention, on any device.

SDPA does not support block tables, so each sequence's blocks are gathered into one workspace that
is allocated once. Sequences are computed one at a time: gathering the whole batch and masking its
padding is slower (it does not fit the CPU cache) and makes a row's bits depend on its neighbours.

The bits of a row depend on its own sequence only: not on the batch, and not on how its prompt was
cut into chunks. A prompt that is computed again gives the same KV. Matrix kernels choose their
order of summation by shape. Prefill therefore computes whole tiles of `QUERY_TILE` positions that
start at multiples of it, wherever the chunk begins and ends. This is also faster, because a tile
does not read keys that all its queries mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F

from .traits import SDPA

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import FlatStep
    from ..kv_pool import KVPool

QUERY_TILE: Final = 64
"""Positions per call of the kernel: 512 tokens took 14.1 ms in one call, 8.4 ms in tiles of 64 and
9.2 ms in tiles of 128 (fp32, 16 heads of 64, one core)."""

TRAITS: Final = SDPA


@dataclass(frozen=True, slots=True)
class _Row:
    """One sequence of the planned step.

    Attributes:
      first: index of the row's first token in the step.
      num_tokens: number of the row's tokens in the step.
      seq_len: length of the sequence after the step.
      blocks: the sequence's blocks, int64 [W].
      is_decode: whether the row is one new token of a completion.
    """

    first: int
    num_tokens: int
    seq_len: int
    blocks: Tensor
    is_decode: bool


class SdpaAttention:
    """The portable backend.

    Args:
      pool: the worker's KV pool.
      num_heads: number of query heads.
      max_model_len: longest sequence; sets the size of the workspace.
    """

    def __init__(self, pool: KVPool, num_heads: int, max_model_len: int) -> None:
        self._pool = pool.blocks
        layout = pool.layout
        self._block_size = layout.block_size
        self._num_kv_heads = layout.num_kv_heads
        self._head_dim = layout.head_dim
        self._scale = 1.0 / math.sqrt(layout.head_dim)
        self._group = num_heads // layout.num_kv_heads
        # A sequence's last block and its last tile may both reach beyond its end.
        max_tokens = max_model_len + layout.block_size + QUERY_TILE
        self._workspace = torch.zeros(
            2,
            max_tokens,
            layout.num_kv_heads,
            layout.head_dim,
            dtype=layout.dtype,
            device=pool.blocks.device,
        )
        # Zero, and causal in its last QUERY_TILE columns: every tile's mask is a tail of this.
        self._mask = torch.zeros(
            QUERY_TILE, max_tokens, dtype=layout.dtype, device=pool.blocks.device
        )
        hidden = torch.ones(QUERY_TILE, QUERY_TILE, dtype=torch.bool, device=pool.blocks.device)
        self._mask[:, -QUERY_TILE:].masked_fill_(hidden.triu(1), float("-inf"))
        self._slots: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self._rows: list[_Row] = []

    def plan(self, step: FlatStep) -> None:
        """See AttentionBackend."""
        device = self._pool.device
        slots = torch.tensor(step.slots, device=device)
        self._slots = (slots[:, 0], slots[:, 1])
        self._rows = []
        for index, (seq_len, table, is_decode) in enumerate(
            zip(step.seq_lens, step.block_tables, step.is_decode, strict=True)
        ):
            first, end = step.query_start_loc[index : index + 2]
            blocks = torch.tensor(list(table), device=device)
            self._rows.append(_Row(first, end - first, seq_len, blocks, is_decode))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See AttentionBackend."""
        key_cache, value_cache = self._pool[:, layer, 0], self._pool[:, layer, 1]
        num_stored = len(self._slots[0])
        key_cache.index_put_(self._slots, key[:num_stored])
        value_cache.index_put_(self._slots, value[:num_stored])
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        output[num_stored:].zero_()
        for row in self._rows:
            keys = self._gather(0, key_cache, row)
            values = self._gather(1, value_cache, row)
            own = slice(row.first, row.first + row.num_tokens)
            if row.is_decode:
                output[own] = self._decode(query[row.first], keys, values)
            else:
                start = row.seq_len - row.num_tokens
                self._prefill(start, query[own], keys, values, output[own])
        return output

    def _gather(self, which: int, cache: Tensor, row: _Row) -> Tensor:
        """Gather a sequence's keys or values: [1, num_kv_heads, n, head_dim].

        n is the sequence's length in decode, and its last tile's end in prefill.
        """
        workspace = self._workspace[which]
        num_gathered = len(row.blocks) * self._block_size
        shape = (len(row.blocks), self._block_size, self._num_kv_heads, self._head_dim)
        torch.index_select(cache, 0, row.blocks, out=workspace[:num_gathered].view(shape))
        num_keys = row.seq_len
        if not row.is_decode:
            num_keys = -(-row.seq_len // QUERY_TILE) * QUERY_TILE
            # A masked key has weight 0, but 0 times a NaN left by a former owner is NaN.
            workspace[row.seq_len : num_keys].zero_()
        return workspace[:num_keys].transpose(0, 1).unsqueeze(0)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend one token. Heads that share keys form the query axis: one pass over the keys."""
        grouped = query.view(1, self._num_kv_heads, self._group, self._head_dim)
        attended = F.scaled_dot_product_attention(grouped, keys, values, scale=self._scale)
        return attended.view(1, -1, self._head_dim)

    def _prefill(
        self, start: int, query: Tensor, keys: Tensor, values: Tensor, output: Tensor
    ) -> None:
        """Attend the tokens of a chunk.

        Args:
          start: position of the chunk's first token.
          query: [n, num_heads, head_dim].
          keys: [1, num_kv_heads, a multiple of QUERY_TILE, head_dim].
          values: same shape as the keys.
          output: [n, num_heads, head_dim]; written.
        """
        end = start + len(query)
        first_tile = start - start % QUERY_TILE
        padded = query.new_zeros(keys.shape[2] - first_tile, *query.shape[1:])
        padded[start - first_tile : end - first_tile] = query
        for tile in range(first_tile, end, QUERY_TILE):
            tile_end = tile + QUERY_TILE
            attended = F.scaled_dot_product_attention(
                padded[tile - first_tile : tile_end - first_tile].transpose(0, 1).unsqueeze(0),
                keys[:, :, :tile_end],
                values[:, :, :tile_end],
                attn_mask=self._mask[:, -tile_end:],
                scale=self._scale,
                enable_gqa=True,
            )
            low, high = max(start, tile), min(end, tile_end)
            output[low - start : high - start] = attended[0].transpose(0, 1)[
                low - tile : high - tile
            ]
