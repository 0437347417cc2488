"""Rotary position embedding: tables of cosines and sines, and the rotation.

Source: RoFormer (Su et al. 2021); frequency scaling as defined by the models' configs (Llama 3.1
and YaRN, Peng et al. 2023).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, assert_never

import torch

from .rope_config import RopeConfig, RopeKind

if TYPE_CHECKING:
    from torch import Tensor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the angle per position of each pair of dimensions, and the scale of cos and sin.

    Returns:
      fp32 [head_dim / 2], and the scale.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case RopeKind.DEFAULT:
            return inverse, 1.0
        case RopeKind.LINEAR:
            return inverse / rope.factor, 1.0
        case RopeKind.LLAMA3:
            return _llama3(rope, inverse), 1.0
        case RopeKind.YARN:
            return _yarn(rope, inverse, head_dim)
        case RopeKind.DIVISORS:
            return inverse / torch.tensor(rope.divisors), 1.0
        case _:
            assert_never(rope.kind)


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Stretch long wavelengths, keep short ones, and interpolate between them."""
    wavelength = 2 * math.pi / inverse
    blend = (rope.original_length / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inverse / rope.factor + blend * inverse


def _yarn(rope: RopeConfig, inverse: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """Interpolate by the number of rotations of a dimension over the original length."""

    def dimension(rotations: float) -> float:
        length = rope.original_length / (rotations * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    width = max(high - low, 0.001)
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    scale = rope.attention_factor
    if scale is None:
        scale = 0.1 * math.log(rope.factor) + 1.0
    return stretch * inverse / rope.factor + (1 - stretch) * inverse, scale


class RotaryTable:
    """Cosines and sines of all positions.

    Args:
      rope: the model's parameters.
      head_dim: dimensions of a head.
      max_model_len: longest sequence.
      device: device of the tables.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_model_len: int, device: torch.device
    ) -> None:
        inverse, scale = inverse_frequencies(rope, head_dim)
        angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * inverse
        # [2, max_model_len, 1, head_dim / 2]; fp32 for every dtype of the model.
        table = torch.stack((angles.cos() * scale, angles.sin() * scale)).unsqueeze(2)
        self._table = table.to(device)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions, each [max_model_len, head_dim / 2]."""
        cosines, sines = self._table.squeeze(2).unbind(0)
        return cosines, sines

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each [T, 1, head_dim / 2], for positions [T]."""
        cos, sin = self._table.index_select(1, positions).unbind(0)
        return cos, sin


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads [T, H, head_dim] in place by the angles of their positions.

    The halves of a head are the two coordinates, as in Hugging Face's weights.
    """
    first, second = heads.chunk(2, dim=-1)
    rotated = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(rotated)
