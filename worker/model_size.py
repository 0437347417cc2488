"""How many weights a model of a given shape has. For people who read the start-up table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.model_config import ModelConfig


def num_parameters(model: ModelConfig) -> int:
    """Return the number of weights, tied ones counted once."""
    hidden, inner = model.hidden_size, model.intermediate_size
    query = model.num_heads * model.head_dim
    key_value = 2 * model.num_kv_heads * model.head_dim
    layer = hidden * (query + key_value) + query * hidden + 3 * hidden * inner + 2 * hidden
    layer += (query + key_value) * model.biases.qkv + hidden * model.biases.output
    layer += (2 * inner + hidden) * model.biases.mlp
    layer += 2 * model.head_dim * model.has_qk_norm
    embeddings = model.vocab_size * hidden * (1 if model.is_tied else 2)
    return embeddings + model.num_layers * layer + hidden
