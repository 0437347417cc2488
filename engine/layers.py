"""Data classes for a transformer's tensors: linear layers, norms, decoder layers, all weights.

Query, key and value weights are stacked in one matrix, gate and up in another, to save calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch.nn.functional as F

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor


class Blocks(NamedTuple):
    """A quantised matrix as stored in its file.

    Attributes:
      name: file and tensor, for errors.
      form: ggml's number of the encoding.
      inputs: inputs per output.
      rows: [out, bytes of an output's blocks].
    """

    name: str
    form: int
    inputs: int
    rows: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer.

    Attributes:
      weight: [out, in]; empty, in the model's dtype, where there are blocks.
      bias: [out] or None.
      blocks: the parts of a quantised weight, in order.
    """

    weight: Tensor
    bias: Tensor | None = None
    blocks: tuple[Blocks, ...] = ()

    def __call__(self, inputs: Tensor) -> Tensor:
        """[T, in] -> [T, out]"""
        return F.linear(inputs, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root-mean-square norm over the last dimension, always computed in fp32.

    Attributes:
      weight: [size].
      eps: added to the mean square.
    """

    weight: Tensor
    eps: float

    def __call__(self, inputs: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        return F.rms_norm(inputs, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer.

    Attributes:
      qkv: out = (num_heads + 2 * num_kv_heads) * head_dim, query heads first, then keys, values.
      gate_up: out = 2 * intermediate_size, gate first.
      query_norm: norm over head_dim; like key_norm, Qwen3 only.
    """

    attention_norm: RMSNorm
    qkv: Linear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of a model.

    Attributes:
      embedding: [vocab_size, hidden_size].
      lm_head: the same tensor as `embedding` in a tied model.
    """

    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    lm_head: Linear
