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

import numpy as np
import torch

from triolet.config import Dtype
from triolet.errors import ConfigError

from ..block_ledger import SCRATCH_BLOCK
from .interface import BackendTraits

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from ..batch import FlatStep
    from ..kv_pool import KVPool

TRAITS: Final = BackendTraits(
    name="flash",
    device_types=frozenset({"cuda"}),
    dtypes=frozenset({Dtype.BFLOAT16}),
    block_size_multiple=256,
    head_dim_multiple=8,
    max_head_dim=256,
)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of a step that go through one kernel, as it wants them.

    Attributes:
      tokens: int64 [n], where their tokens lie in the step.
      block_table: int32 [rows, W]; cells beyond a sequence hold the scratch block.
      seq_lens: int32 [rows], tokens of each sequence after the step.
      query_start_loc: int32 [rows + 1], over `tokens`.
      key_start_loc: int32 [rows + 1], running sum of `seq_lens`.
    """

    tokens: npt.NDArray[np.int64]
    block_table: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    query_start_loc: npt.NDArray[np.int32]
    key_start_loc: npt.NDArray[np.int32]

    @property
    def max_query_len(self) -> int:
        """Tokens of the longest row."""
        return int(np.diff(self.query_start_loc).max())

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.seq_lens.max())


def group_rows(step: FlatStep, is_decode: bool) -> RowGroup | None:
    """Lay out a step's decode rows, or its prompt rows; None if there are none."""
    rows = [index for index, decodes in enumerate(step.is_decode) if decodes is is_decode]
    if not rows:
        return None
    starts = step.query_start_loc
    lengths = [starts[row + 1] - starts[row] for row in rows]
    seq_lens = [step.seq_lens[row] for row in rows]
    width = max(len(step.block_tables[row]) for row in rows)
    block_table = np.full((len(rows), width), SCRATCH_BLOCK, dtype=np.int32)
    for index, row in enumerate(rows):
        block_table[index, : len(step.block_tables[row])] = step.block_tables[row]
    return RowGroup(
        tokens=np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows]),
        block_table=block_table,
        seq_lens=np.array(seq_lens, dtype=np.int32),
        query_start_loc=_running_sum(lengths),
        key_start_loc=_running_sum(seq_lens),
    )


def _running_sum(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


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


class FlashAttention:
    """The backend for NVIDIA GPUs with flash-attn.

    The split-KV kernel chooses its number of splits by the batch, so here, unlike in `sdpa`, a
    row's last bits may depend on its neighbours.

    Args:
      pool: the worker's KV.

    Raises:
      ConfigError: flash-attn is not installed.
    """

    def __init__(self, pool: KVPool) -> None:
        try:
            self._kernels: Any = import_module("flash_attn")
        except ImportError as error:
            raise ConfigError(
                f"backend is 'flash', but flash-attn cannot be imported ({error}); install the "
                "extra `gpu` (pip install 'triolet[gpu]'), or use backend 'sdpa'"
            ) from error
        self._pool = pool.blocks
        self._scale = 1.0 / math.sqrt(pool.layout.head_dim)
        self._slots: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self._decode: _DeviceGroup | None = None
        self._prefill: _DeviceGroup | None = None

    def plan(self, step: FlatStep) -> None:
        """See AttentionBackend."""
        device = self._pool.device
        slots = torch.tensor(step.slots).to(device)
        self._slots = (slots[:, 0], slots[:, 1])
        decode, prefill = group_rows(step, is_decode=True), group_rows(step, is_decode=False)
        self._decode = _DeviceGroup.of(decode, device) if decode else None
        self._prefill = _DeviceGroup.of(prefill, device) if prefill else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See AttentionBackend."""
        key_cache, value_cache = self._pool[:, layer, 0], self._pool[:, layer, 1]
        num_stored = len(self._slots[0])
        key_cache.index_put_(self._slots, key[:num_stored])
        value_cache.index_put_(self._slots, value[:num_stored])
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        if (group := self._decode) is not None:
            attended = self._kernels.flash_attn_with_kvcache(
                query[group.tokens].unsqueeze(1),
                key_cache,
                value_cache,
                cache_seqlens=group.seq_lens,
                block_table=group.block_table,
                softmax_scale=self._scale,
                causal=True,
                num_splits=0,
            )
            output[group.tokens] = attended.squeeze(1)
        if (group := self._prefill) is not None:
            output[group.tokens] = self._kernels.flash_attn_varlen_func(
                query[group.tokens],
                key_cache,
                value_cache,
                cu_seqlens_q=group.query_start_loc,
                cu_seqlens_k=group.key_start_loc,
                max_seqlen_q=group.max_query_len,
                max_seqlen_k=group.max_seq_len,
                softmax_scale=self._scale,
                causal=True,
                block_table=group.block_table,
            )
        return output
