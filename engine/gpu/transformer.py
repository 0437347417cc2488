"""The forward pass with fused GPU kernels: the sums of engine/model.py in fewer operations.

The host never waits here, so the pass can be captured as a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

from ..rope import RotaryTable
from .layer_kernels import add_norm, rotate_store, silu_mul

if TYPE_CHECKING:
    from torch import Tensor

    from ..attention.interface import PagedAttention
    from ..kv_pool import KVPool
    from ..layers import Weights
    from ..model_config import ModelConfig


class FusedTransformer:
    """A model of the Llama family.

    Args:
      config: the model's shape.
      weights: the model's tensors, on one device.
      pool: the KV pool.
      attention: attention over the pool.
      max_model_len: longest sequence.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        pool: KVPool,
        attention: PagedAttention,
        max_model_len: int,
    ) -> None:
        self.attention = attention
        self.vocab_size = config.vocab_size
        self._head_dim = config.head_dim
        self._weights = weights
        self._pool = pool.blocks
        rotary = RotaryTable(config.rope, config.head_dim, max_model_len, pool.blocks.device)
        self._tables = rotary.tables

    def forward(self, token_ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Compute a step for which the attention backend has run `plan`.

        Args:
          token_ids: int64 [T].
          positions: int64 [T].
          slots: int64 [T], block * block_size + offset.

        Returns:
          Hidden states [T, hidden_size] after the last norm.
        """
        residual = F.embedding(token_ids, self._weights.embedding)
        delta: Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            normed = add_norm(delta, residual, layer.attention_norm)
            heads = layer.qkv(normed).view(len(residual), -1, self._head_dim)
            norms = None
            if layer.query_norm is not None and layer.key_norm is not None:
                norms = (layer.query_norm, layer.key_norm)
            query = rotate_store(heads, self._tables, positions, slots, norms, self._pool[:, index])
            attended = self.attention.attend_stored(index, query)
            delta = layer.output(attended.view(len(residual), -1))
            normed = add_norm(delta, residual, layer.mlp_norm)
            delta = layer.down(silu_mul(layer.gate_up(normed)))
        return add_norm(delta, residual, self._weights.norm)

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab_size], in the weights' dtype, for some rows of hidden states."""
        return self._weights.lm_head(hidden)
