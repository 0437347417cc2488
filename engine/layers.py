"""The tensors of a transformer in the form that the forward pass uses.

Query, key and value weights are one matrix, gate and up another: one call instead of three or two.
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
    """A quantised matrix as its file has it.

    Attributes:
      name: of file and tensor, for errors.
      form: as ggml numbers it.
      inputs: of an output.
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
      blocks: a quantised weight's parts, one after the other.
    """

    weight: Tensor
    bias: Tensor | None = None
    blocks: tuple[Blocks, ...] = ()

    def __call__(self, inputs: Tensor) -> Tensor:
        """[T, in] -> [T, out]"""
        return F.linear(inputs, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root-mean-square norm over the last dimension; computed in fp32 whatever the dtype.

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
      query_norm: over head_dim; with key_norm, Qwen3 only.
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
