"""Compute steps with prompt rows on the GPU, operation by operation.

Steps of decode rows only go through engine/gpu/decoder.py where possible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..model import hand_out

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import FlatStep
    from .transformer import FusedTransformer


class FusedModel:
    """The StepModel (engine/runner.py) of a GPU.

    Args:
      transformer: the forward pass.
      block_size: tokens per block.
      device: the GPU.
    """

    def __init__(
        self, transformer: FusedTransformer, block_size: int, device: torch.device
    ) -> None:
        self._transformer = transformer
        self._block_size = block_size
        self._device = device

    def compute(self, step: FlatStep) -> Tensor | None:
        """See engine.runner.StepModel."""
        padding = len(step.token_ids) - len(step.slots)
        slots = [block * self._block_size + offset for block, offset in step.slots]
        self._transformer.attention.plan_rows(step)
        hidden = self._transformer.forward(
            torch.tensor(step.token_ids, device=self._device),
            torch.tensor(step.positions, device=self._device),
            # Padding is stored in the scratch block.
            torch.tensor(slots + [0] * padding, device=self._device),
        )
        hand_out(step, hidden)
        if not step.sample_rows:
            return None
        last = torch.tensor(step.sample_tokens, device=self._device)
        return self._transformer.head(hidden.index_select(0, last)).float()
