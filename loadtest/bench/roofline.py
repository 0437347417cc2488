"""What a step would take at the machine's limits: bytes at the speed of memory, or products at the
speed of a large matrix product, whichever is longer.

Pure arithmetic on a model's shape. Both limits are measured in the same run (machine.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import Shape

NUMBER_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Work:
    """What has to be done.

    Attributes:
      weight_bytes: read once.
      kv_bytes: of the context, read once.
      products: multiplications with weights, each with its addition counted as two operations.
      attention: the same in attention.
    """

    weight_bytes: float
    kv_bytes: float
    products: float
    attention: float

    def at_limits_s(self, bytes_per_s: float, operations_per_s: float) -> float:
        """Return the least seconds that it can take."""
        moving = (self.weight_bytes + self.kv_bytes) / bytes_per_s
        return max(moving, (self.products + self.attention) / operations_per_s)


def decode_work(shape: Shape, dtype: str, weight_bytes: float, batch: int, context: int) -> Work:
    """Return the work of a step of `batch` sequences of `context` tokens.

    Args:
      shape: of the model.
      dtype: of KV.
      weight_bytes: of one weight.
      batch: sequences.
      context: tokens of each, the new one included.
    """
    weights = layer_weights(shape) + head_weights(shape)
    kv_bytes = batch * context * shape.kv_numbers_per_token * NUMBER_BYTES[dtype]
    return Work(
        weights * weight_bytes, kv_bytes, 2.0 * batch * weights, batch * _attention(shape, context)
    )


def prefill_work(shape: Shape, weight_bytes: float, batch: int, context: int) -> Work:
    """Return the work of prompts: all tokens through the layers, the last ones through the head."""
    tokens = batch * context
    layers, head = layer_weights(shape), head_weights(shape)
    return Work(
        (layers + head) * weight_bytes,
        0.0,
        2.0 * (tokens * layers + batch * head),
        tokens * _attention(shape, context / 2),
    )


def layer_weights(shape: Shape) -> float:
    """Return how many weights the layers' matrices have."""
    heads = shape.num_heads + 2 * shape.num_kv_heads
    attention = shape.hidden_size * shape.head_dim * (heads + shape.num_heads)
    return shape.num_layers * (attention + 3.0 * shape.hidden_size * shape.intermediate_size)


def head_weights(shape: Shape) -> float:
    """Return how many weights the output layer has."""
    return float(shape.vocab_size * shape.hidden_size)


def _attention(shape: Shape, seen: float) -> float:
    """Return the operations of one token that sees so many."""
    return 4.0 * seen * shape.num_layers * shape.num_heads * shape.head_dim
