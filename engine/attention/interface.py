"""What every attention backend offers, and what it can be used with.

Knows no kernel. A backend is asked to `plan` once per step and to `attend` once per layer; it
stores the step's keys and values itself, so that a backend may fuse the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import FlatStep
    from ..kv_pool import KVPool


class AttentionBackend(Protocol):
    """Attention for one worker's pool. Used by the device thread only."""

    def plan(self, step: FlatStep) -> None:
        """Prepare what all layers of a step share. Called once, before the first `attend`."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store a layer's keys and values, then attend, causally, to each row's whole sequence.

        Args:
          layer: index of the layer.
          query: [T, num_heads, head_dim], rotated; T counts padding.
          key: [T, num_kv_heads, head_dim], rotated.
          value: [T, num_kv_heads, head_dim].

        Returns:
          [T, num_heads, head_dim]; what stands at padding is finite and means nothing.
        """
        ...


class PagedAttention(ABC):
    """An AttentionBackend whose kernels read blocks in place, wherever keys were stored.

    What else happens to a layer's keys and values may be fused with storing them; such a caller
    stores by itself and uses `attend_stored`.

    Args:
      pool: the worker's KV.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool.blocks
        self._slots: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def plan(self, step: FlatStep) -> None:
        """See AttentionBackend."""
        slots = torch.tensor(step.slots).to(self._pool.device)
        self._slots = (slots[:, 0], slots[:, 1])
        self.plan_rows(step)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See AttentionBackend."""
        num_stored = len(self._slots[0])
        self._pool[:, layer, 0].index_put_(self._slots, key[:num_stored])
        self._pool[:, layer, 1].index_put_(self._slots, value[:num_stored])
        return self.attend_stored(layer, query.contiguous())

    @abstractmethod
    def plan_rows(self, step: FlatStep) -> None:
        """Prepare what all layers of a step share, but for where keys are stored."""

    @abstractmethod
    def plan_decode(self, block_table: Tensor, seq_lens: Tensor) -> None:
        """Prepare a step of one token per row, whose rows are told by tensors.

        Args:
          block_table: int32 [rows, W]; contiguous in its last dimension.
          seq_lens: int32 [rows], at least 1, this step's token included.
        """

    @abstractmethod
    def attend_stored(self, layer: int, query: Tensor) -> Tensor:
        """Attend as in `attend`; keys and values are in the pool.

        Args:
          layer: index of the layer.
          query: [T, num_heads, head_dim], rotated, contiguous.
        """
