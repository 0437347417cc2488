"""Reference attention in plain torch, for tests of the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def attention_of_one(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Explicit bottom-right causal attention in fp64: query [n, Hq, D], keys [S, Hkv, D]."""
    group = query.shape[1] // keys.shape[1]
    keys = keys.double().repeat_interleave(group, dim=1)
    values = values.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    offset = keys.shape[0] - query.shape[0]
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(offset + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
