"""What flash-attn's two paged kernels compute, in plain torch: a fake with their signatures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def attention_of_one(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Explicit bottom-right causal attention in fp64: query [n, Hq, D], keys [S, Hkv, D]."""
    group = query.shape[1] // keys.shape[1]
    keys = keys.double().repeat_interleave(group, dim=1)
    values = values.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    offset = keys.shape[0] - query.shape[0]
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(offset + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def paged(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """Read a sequence out of [num_blocks, block_size, H, D]."""
    return cache[block_table.long()].flatten(0, 1)[:seq_len]


class FakeFlashAttn:
    """Stands in for the package `flash_attn`; strict about what the real one is strict about.

    Attributes:
      decode_cuts: of each call of the decode kernel the tokens of a split, from which the order of
        its sums follows: the width of the table by the number of splits.
    """

    def __init__(self) -> None:
        self.decode_cuts: list[float] = []

    @staticmethod
    def _check(cache: Tensor, *index_tensors: Tensor) -> None:
        assert cache.stride(-1) == 1
        assert cache.shape[1] % 256 == 0
        assert all(t.dtype is torch.int32 and t.is_contiguous() for t in index_tensors)

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        causal: bool,
        num_splits: int,
    ) -> Tensor:
        self._check(k_cache, cache_seqlens, block_table)
        assert causal
        assert 1 <= num_splits <= 128, "0 leaves the number to the size of the batch"
        self.decode_cuts.append(block_table.shape[1] * k_cache.shape[1] / num_splits)
        assert q.shape[:2] == (len(cache_seqlens), 1)
        rows = [
            attention_of_one(
                q[row],
                paged(k_cache, block_table[row], int(seq_len)),
                paged(v_cache, block_table[row], int(seq_len)),
                softmax_scale,
            )
            for row, seq_len in enumerate(cache_seqlens)
        ]
        return torch.stack(rows)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        block_table: Tensor,
    ) -> Tensor:
        self._check(k, cu_seqlens_q, cu_seqlens_k, block_table)
        assert causal
        assert max_seqlen_q > 1, "the real one would change over to its decode kernel"
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        assert max_seqlen_k == int(cu_seqlens_k.diff().max())
        rows = [
            attention_of_one(
                q[int(cu_seqlens_q[row]) : int(cu_seqlens_q[row + 1])],
                paged(k, block_table[row], seq_len),
                paged(v, block_table[row], seq_len),
                softmax_scale,
            )
            for row, seq_len in enumerate(cu_seqlens_k.diff().tolist())
        ]
        return torch.cat(rows)
