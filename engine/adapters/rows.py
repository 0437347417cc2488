"""Apply LoRA adapters to the tokens of a step, in torch. The C kernels have engine/native."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..batch import STEP_TOKENS_MULTIPLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ..batch import FlatStep
    from .tensors import Adapter


def tokens_by_adapter(step: FlatStep) -> dict[bytes, list[int]]:
    """Return the indices of a step's tokens that use an adapter, by the adapter's digest."""
    found: dict[bytes, list[int]] = {}
    if any(step.adapters):
        for row, adapter in enumerate(step.adapters):
            if adapter:
                tokens = range(step.query_start_loc[row], step.query_start_loc[row + 1])
                found.setdefault(adapter, []).extend(tokens)
    return found


class AdaptedTokens:
    """The tokens of one step that use an adapter; adds the adapters' output to their rows.

    Args:
      adapters: all adapters, by digest.
      step: the step; its rows name their adapters.
      device: where the additions are computed.
    """

    def __init__(
        self, adapters: Mapping[bytes, Adapter], step: FlatStep, device: torch.device
    ) -> None:
        self._groups = [
            (adapters[digest], torch.tensor(tokens, device=device), _padded(tokens, device))
            for digest, tokens in tokens_by_adapter(step).items()
        ]

    def add(self, layer: int, product: str, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Add the adapters' share to a product's outputs [T, out] in place, from inputs [T, in]."""
        for adapter, tokens, padded in self._groups:
            low = adapter.layers[layer].get(product)
            if low is not None:
                added = F.linear(F.linear(inputs.index_select(0, padded), low.down), low.up)
                outputs.index_add_(0, tokens, added[: len(tokens)])
        return outputs


def _padded(tokens: list[int], device: torch.device) -> Tensor:
    """Return the tokens padded to a multiple of STEP_TOKENS_MULTIPLE, which gives the reason."""
    missing = -len(tokens) % STEP_TOKENS_MULTIPLE
    return torch.tensor(tokens + [tokens[0]] * missing, device=device)
