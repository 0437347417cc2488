"""The forward pass of a decoder-only transformer over a flat step, in torch.

Decode rows and prefill chunks are computed together, one matrix row per token. Only attention
separates sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from .adapters.rows import AdaptedTokens
from .rope import RotaryTable, rotate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from .adapters.tensors import Adapter
    from .attention.interface import AttentionBackend
    from .batch import FlatStep
    from .layers import DecoderLayer, Weights
    from .model_config import ModelConfig


class Transformer:
    """A model of the Llama family.

    Args:
      config: the model's shape.
      weights: the model's tensors, all of one dtype and on one device.
      max_model_len: longest sequence.
    """

    def __init__(self, config: ModelConfig, weights: Weights, max_model_len: int) -> None:
        self.config = config
        self.weights = weights
        self._rotary = RotaryTable(
            config.rope, config.head_dim, max_model_len, weights.embedding.device
        )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        adapted: AdaptedTokens,
    ) -> Tensor:
        """Compute a step.

        Args:
          token_ids: int64 [T].
          positions: int64 [T].
          attention: planned for this step; stores keys and values.
          adapted: the tokens that use an adapter.

        Returns:
          Hidden states [T, hidden_size] after the final norm.
        """
        hidden = F.embedding(token_ids, self.weights.embedding)
        cos, sin = self._rotary.at(positions)
        for index, layer in enumerate(self.weights.layers):
            normed = layer.attention_norm(hidden)
            heads = adapted.add(index, "qkv", normed, layer.qkv(normed))
            query, key, value = self._rotated(layer, heads, cos, sin)
            attended = attention.attend(index, query, key, value).view(len(hidden), -1)
            hidden = hidden + adapted.add(index, "output", attended, layer.output(attended))
            normed = layer.mlp_norm(hidden)
            gate, up = adapted.add(index, "gate_up", normed, layer.gate_up(normed)).chunk(2, dim=-1)
            joined = F.silu(gate).mul_(up)
            hidden = hidden + adapted.add(index, "down", joined, layer.down(joined))
        return self.weights.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab_size] of some hidden states, in fp32."""
        return self.weights.lm_head(hidden).float()

    def _rotated(
        self, layer: DecoderLayer, projected: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [T, Hq, D] and key [T, Hkv, D], both rotated, and value [T, Hkv, D]."""
        config = self.config
        heads = projected.view(len(projected), -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        if layer.query_norm is not None and layer.key_norm is not None:
            heads[:, : config.num_heads] = layer.query_norm(heads[:, : config.num_heads])
            keys = heads[:, config.num_heads : num_rotated]
            keys.copy_(layer.key_norm(keys))
        rotate(heads[:, :num_rotated], cos, sin)
        return (
            heads[:, : config.num_heads],
            heads[:, config.num_heads : num_rotated],
            heads[:, num_rotated:],
        )


class TorchModel:
    """A transformer computed by torch, with an attention backend.

    Args:
      transformer: the forward pass.
      attention: the backend.
      adapters: adapters that rows may name, by digest.
    """

    def __init__(
        self,
        transformer: Transformer,
        attention: AttentionBackend,
        adapters: Mapping[bytes, Adapter],
    ) -> None:
        self._transformer = transformer
        self._attention = attention
        self._adapters = adapters
        self._device = transformer.weights.embedding.device

    def compute(self, step: FlatStep) -> Tensor | None:
        """See engine.runner.StepModel."""
        self._attention.plan(step)
        hidden = self._transformer.forward(
            torch.tensor(step.token_ids, device=self._device),
            torch.tensor(step.positions, device=self._device),
            self._attention,
            AdaptedTokens(self._adapters, step, self._device),
        )
        hand_out(step, hidden)
        if not step.sample_rows:
            return None
        last = torch.tensor(step.sample_tokens, device=self._device)
        return self._transformer.logits(hidden.index_select(0, last))


def hand_out(step: FlatStep, hidden: Tensor) -> None:
    """Pass a step's hidden states [T, hidden_size] to the rows that pool them."""
    for _, first, count, pool in step.pooled:
        pool.add(hidden[first : first + count].float().cpu().numpy())
