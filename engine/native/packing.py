"""Weights as the kernels read them: panels of outputs, in the order in which they are used.

A panel holds some outputs' weights, interleaved: first their first word each, then their second.
A word is four bytes: one float, or two bf16 that are neighbours along the input. One walk through
memory from beginning to end is then a whole product.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

WORD_BYTES = 4


def pack(weight: Tensor, panel: int) -> Tensor:
    """Cut a weight into panels.

    Args:
      weight: [out, in], fp32 or bf16.
      panel: outputs per panel.

    Returns:
      int32 [panels, words of a row, panel]; outputs and inputs that are missing are zero.
    """
    per_word = WORD_BYTES // weight.element_size()
    inputs = -weight.shape[1] % per_word
    outputs = -weight.shape[0] % panel
    if inputs or outputs:
        weight = F.pad(weight, (0, inputs, 0, outputs))
    words = weight.contiguous().view(torch.int32)
    packed = _pages(words.numel()).view(-1, words.shape[1], panel)
    return packed.copy_(words.view(-1, panel, words.shape[1]).transpose(1, 2))


def join_gate_up(weight: Tensor, panel: int) -> Tensor:
    """Reorder gates and ups so that each panel holds as many of both, and they belong together.

    Args:
      weight: [2 * intermediate_size, ...], gates first.
      panel: outputs per panel.

    Returns:
      [2 * intermediate_size rounded up to whole panels, ...].
    """
    half = panel // 2
    gate, up = weight.chunk(2)
    missing = -len(gate) % half
    if missing:
        padding = (0, 0) * (weight.dim() - 1) + (0, missing)
        gate, up = F.pad(gate, padding), F.pad(up, padding)
    rest = weight.shape[1:]
    return torch.stack((gate.view(-1, half, *rest), up.view(-1, half, *rest)), 1).view(-1, *rest)


def widen(weight: Tensor, inputs: int) -> Tensor:
    """Give a weight [out, in] more inputs, with weights of zero."""
    return F.pad(weight, (0, inputs - weight.shape[1]))


def _pages(num_words: int) -> Tensor:
    """Return int32 memory on large pages where the system has them.

    A decode step walks through all weights once; with pages of 4 KiB the walk waits for page tables
    as well.
    """
    memory = mmap.mmap(-1, num_words * WORD_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int32)
