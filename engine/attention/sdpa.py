"""Attention by torch's scaled_dot_product_attention: works on any device, needs no extra package.

SDPA knows no block tables, so each sequence's blocks are gathered into one workspace that is
allocated once. One sequence at a time: gathering the batch and masking its padding is slower
(it leaves the cache) and makes a row's bits depend on its neighbours.

The bits of a row depend on its own sequence only, not on the batch and not on how its prompt was
cut into chunks. Three things see to that: no sequence is padded to another's length; the number of
keys is a multiple of `KEY_MULTIPLE` in prefill (the kernel sums the rest apart, in another order);
and there are at least four query rows (matrix times vector is another kernel).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F

from triolet.config import Dtype

from ..batch import MIN_STEP_TOKENS, FlatStep
from .interface import BackendTraits

if TYPE_CHECKING:
    from torch import Tensor

    from ..kv_pool import KVPool

KEY_MULTIPLE: Final = 16
"""Floats of the widest CPU vector (AVX-512)."""

TRAITS: Final = BackendTraits(
    name="sdpa",
    device_types=frozenset({"cpu", "cuda"}),
    dtypes=frozenset({Dtype.FLOAT32, Dtype.BFLOAT16}),
    block_size_multiple=1,
    max_head_dim=1024,
    is_graph_capturable=False,
)


@dataclass(frozen=True, slots=True)
class _Row:
    """One sequence of the planned step.

    Attributes:
      first: index of its first token in the step.
      num_tokens: how many it has there.
      seq_len: tokens of its sequence after the step.
      blocks: its blocks, int64 [W].
      mask: float [max(num_tokens, 4), padded keys], None in decode, which sees all keys.
    """

    first: int
    num_tokens: int
    seq_len: int
    blocks: Tensor
    mask: Tensor | None


class SdpaAttention:
    """The portable backend.

    Args:
      pool: the worker's KV.
      num_heads: query heads.
      max_model_len: the longest sequence; sizes the workspace.
    """

    def __init__(self, pool: KVPool, num_heads: int, max_model_len: int) -> None:
        self._pool = pool.blocks
        layout = pool.layout
        self._block_size = layout.block_size
        self._num_kv_heads = layout.num_kv_heads
        self._head_dim = layout.head_dim
        self._scale = 1.0 / math.sqrt(layout.head_dim)
        self._group = num_heads // layout.num_kv_heads
        max_tokens = -(-max_model_len // layout.block_size) * layout.block_size + KEY_MULTIPLE
        self._workspace = torch.zeros(
            2,
            max_tokens,
            layout.num_kv_heads,
            layout.head_dim,
            dtype=layout.dtype,
            device=pool.blocks.device,
        )
        self._slots: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self._rows: list[_Row] = []

    def plan(self, step: FlatStep) -> None:
        """See AttentionBackend."""
        device = self._pool.device
        slots = torch.tensor(step.slots, device=device)
        self._slots = (slots[:, 0], slots[:, 1])
        self._rows = []
        for index, (seq_len, table) in enumerate(
            zip(step.seq_lens, step.block_tables, strict=True)
        ):
            first, end = step.query_start_loc[index : index + 2]
            num_tokens = end - first
            mask = self._mask(num_tokens, seq_len) if num_tokens > 1 else None
            blocks = torch.tensor(list(table), device=device)
            self._rows.append(_Row(first, num_tokens, seq_len, blocks, mask))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See AttentionBackend."""
        key_cache, value_cache = self._pool[:, layer, 0], self._pool[:, layer, 1]
        num_stored = len(self._slots[0])
        key_cache.index_put_(self._slots, key[:num_stored])
        value_cache.index_put_(self._slots, value[:num_stored])
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        output[num_stored:].zero_()
        for row in self._rows:
            num_keys = row.seq_len if row.mask is None else row.mask.shape[1]
            keys = self._gather(0, key_cache, row, num_keys)
            values = self._gather(1, value_cache, row, num_keys)
            if row.mask is None:
                output[row.first] = self._decode(query[row.first], keys, values)
            else:
                end = row.first + row.num_tokens
                output[row.first : end] = self._prefill(
                    query[row.first : end], keys, values, row.mask
                )
        return output

    def _mask(self, num_tokens: int, seq_len: int) -> Tensor:
        """Return the bottom-right causal mask; rows and keys beyond the sequence are padding."""
        num_keys = -(-seq_len // KEY_MULTIPLE) * KEY_MULTIPLE
        num_rows = max(num_tokens, MIN_STEP_TOKENS)
        device = self._pool.device
        last_visible = torch.arange(num_rows, device=device) + (seq_len - num_tokens)
        last_visible.clamp_(max=seq_len - 1)
        hidden = torch.arange(num_keys, device=device) > last_visible[:, None]
        mask = torch.zeros(num_rows, num_keys, dtype=self._pool.dtype, device=device)
        return mask.masked_fill_(hidden, float("-inf"))

    def _gather(self, which: int, cache: Tensor, row: _Row, num_keys: int) -> Tensor:
        """Copy a sequence's keys or values together: [1, num_kv_heads, num_keys, head_dim]."""
        workspace = self._workspace[which]
        num_gathered = len(row.blocks) * self._block_size
        shape = (len(row.blocks), self._block_size, self._num_kv_heads, self._head_dim)
        torch.index_select(cache, 0, row.blocks, out=workspace[:num_gathered].view(shape))
        # A hidden key's weight is 0, but 0 times what a former owner left there may be NaN.
        workspace[row.seq_len : num_keys].zero_()
        return workspace[:num_keys].transpose(0, 1).unsqueeze(0)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend one token. Heads that share keys are its query axis: one pass over the keys."""
        grouped = query.view(1, self._num_kv_heads, self._group, self._head_dim)
        attended = F.scaled_dot_product_attention(grouped, keys, values, scale=self._scale)
        return attended.view(-1, self._head_dim)

    def _prefill(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attend the tokens of a chunk, [n, num_heads, head_dim]."""
        num_tokens = query.shape[0]
        padding = mask.shape[0] - num_tokens
        if padding:
            query = torch.cat((query, query.new_zeros(padding, *query.shape[1:])))
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=mask,
            scale=self._scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)[:num_tokens]
