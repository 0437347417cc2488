"""Weights as the kernels read them: panels of outputs, in the order in which they are used.

A panel holds some outputs' weights, interleaved: first their first word each, then their second.
A word is four bytes: one float, or two bf16 that are neighbours along the input. One walk through
memory from beginning to end is then a whole product. In int8 a word holds as many numbers, of one
byte each, and every output has a scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import torch.nn.functional as F

from triolet.memory import zeroed_memory

from .structs import PackingFields

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from .library import Library

WORD_BYTES: Final = 4


class Packed(NamedTuple):
    """A weight in panels.

    Attributes:
      weight: bytes [panels, steps, panel * numbers per word * bytes of a number].
      scales: fp32 [panels * panel] of an int8 weight, else None.
      panels: how many.
      steps: words of an output.
    """

    weight: Tensor
    scales: Tensor | None
    panels: int
    steps: int


def own_pages(num_bytes: int) -> Tensor:
    """Return fresh memory on large pages."""
    return torch.frombuffer(zeroed_memory(num_bytes), dtype=torch.uint8)


def pack(
    library: Library,
    weight: Tensor,
    *,
    is_int8: bool = False,
    is_gate_up: bool = False,
    inputs: int = 0,
    room: Callable[[int], Tensor] = own_pages,
    num_threads: int | None = None,
) -> Packed:
    """Cut a weight into panels; what is missing in the last one is zero.

    Args:
      library: knows how wide a panel is, and does it.
      weight: [out, in], fp32 or bf16.
      is_int8: round each output to int8, by a scale of its own.
      is_gate_up: the first half of the outputs are gates; each panel gets some of them and, after
        them, the ups that they belong to.
      inputs: inputs to have at least; weights that this adds are zero.
      room: returns memory of a size for the panels.
      num_threads: to do it with; None for as many as torch.
    """
    per_word = WORD_BYTES // weight.element_size()
    if weight.shape[1] % per_word:
        weight = F.pad(weight, (0, 1))
    weight = weight.contiguous()
    halves = 2 if is_gate_up else 1
    panels = -(-(len(weight) // halves) // (library.panel // halves))
    steps = -(-max(weight.shape[1], inputs) // per_word)
    width = library.panel * (per_word if is_int8 else WORD_BYTES)
    packed = room(panels * steps * width).view(panels, steps, width)
    scales = torch.empty(panels * library.panel) if is_int8 else None
    nothing = torch.zeros_like(weight[0])
    fields = PackingFields(
        is_bf16=weight.dtype is torch.bfloat16,
        outputs=len(weight),
        inputs=weight.shape[1],
        is_gate_up=is_gate_up,
        weight=weight.data_ptr(),
        nothing=nothing.data_ptr(),
        panels=panels,
        steps=steps,
        packed=packed.data_ptr(),
        scales=None if scales is None else scales.data_ptr(),
    )
    library.pack(fields, num_threads or torch.get_num_threads())
    return Packed(packed, scales, panels, steps)


def pack_bias(bias: Tensor, panel: int, *, is_gate_up: bool = False) -> Tensor:
    """Return a bias in the order of its packed weight's outputs: fp32, whole panels of it."""
    if not is_gate_up:
        return F.pad(bias.float(), (0, -len(bias) % panel))
    half = panel // 2
    missing = -(len(bias) // 2) % half
    gate, up = (F.pad(part.float(), (0, missing)).view(-1, half) for part in bias.chunk(2))
    return torch.stack((gate, up), 1).flatten()
