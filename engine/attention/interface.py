"""The interface of attention backends.

`plan` is called once per step and `attend` once per layer. The backend stores the step's keys and
values itself, so that it can fuse storing and attending.
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
        """Prepare what all layers of a step share."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store a layer's keys and values, then attend causally to each row's whole sequence.

        Args:
          layer: index of the layer.
          query: [T, num_heads, head_dim], rotated; T includes padding.
          key: [T, num_kv_heads, head_dim], rotated.
          value: [T, num_kv_heads, head_dim].

        Returns:
          [T, num_heads, head_dim]; values at padding are finite but meaningless.
        """
        ...


class PagedAttention(ABC):
    """An AttentionBackend with kernels that read KV blocks in place.

    A caller that fuses storing keys and values with other work stores them itself and calls
    `attend_stored`.

    Args:
      pool: the worker's KV pool.
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
        """Prepare what all layers of a step share, except where keys are stored."""

    @abstractmethod
    def plan_decode(self, block_table: Tensor, seq_lens: Tensor) -> None:
        """Prepare a step of one token per row, given as tensors.

        Args:
          block_table: int32 [rows, W]; contiguous in its last dimension.
          seq_lens: int32 [rows], at least 1, including this step's token.
        """

    @abstractmethod
    def attend_stored(self, layer: int, query: Tensor) -> Tensor:
        """Attend as in `attend`, to keys and values that are already in the pool.

        Args:
          layer: index of the layer.
          query: [T, num_heads, head_dim], rotated, contiguous.
        """
