"""The tokens of a step that have an adapter, and what torch adds to their rows."""

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
    """Return the tokens of a step that have an adapter, by its digest."""
    found: dict[bytes, list[int]] = {}
    if any(step.adapters):
        for row, adapter in enumerate(step.adapters):
            if adapter:
                tokens = range(step.query_start_loc[row], step.query_start_loc[row + 1])
                found.setdefault(adapter, []).extend(tokens)
    return found


class AdaptedTokens:
    """The tokens of one step that have an adapter, and what is added to their rows; in torch.

    Args:
      adapters: all, by digest.
      step: names the adapters of its rows.
      device: where it is computed.
    """

    def __init__(
        self, adapters: Mapping[bytes, Adapter], step: FlatStep, device: torch.device
    ) -> None:
        self._groups = [
            (adapters[digest], torch.tensor(tokens, device=device), _padded(tokens, device))
            for digest, tokens in tokens_by_adapter(step).items()
        ]

    def add(self, layer: int, product: str, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Add to the outputs of a product, in place: [T, out] for inputs [T, in]."""
        for adapter, tokens, padded in self._groups:
            low = adapter.layers[layer].get(product)
            if low is not None:
                added = F.linear(F.linear(inputs.index_select(0, padded), low.down), low.up)
                outputs.index_add_(0, tokens, added[: len(tokens)])
        return outputs


def _padded(tokens: list[int], device: torch.device) -> Tensor:
    """Return as many tokens as kernels take without a rest: see STEP_TOKENS_MULTIPLE."""
    missing = -len(tokens) % STEP_TOKENS_MULTIPLE
    return torch.tensor(tokens + [tokens[0]] * missing, device=device)
