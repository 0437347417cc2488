"""Pack weights into panels of outputs, the order in which the C kernels read them.

A panel interleaves the weights of several outputs: the first word of each, then the second, and so
on. A word has four bytes: one float, or two bf16 of neighbouring inputs. A product then reads
memory sequentially once. Quantised weights are packed into strips of half a panel, see
source/groups.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from triolet.errors import ModelError
from triolet.memory import zeroed_memory

from .structs import GroupPackingFields, PackingFields

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ..layers import Blocks
    from .library import Library

WORD_BYTES: Final = 4


class Packed(NamedTuple):
    """A weight in panels.

    Attributes:
      weight: bytes [panels, steps, panel * bytes of a word]; for quantised weights, all strips.
      panels: number of panels.
      steps: words per output.
      strips: encoding and offset of each strip of a quantised weight, else None.
    """

    weight: Tensor
    panels: int
    steps: int
    strips: Tensor | None = None


def own_pages(num_bytes: int) -> Tensor:
    """Allocate memory on large pages."""
    return torch.frombuffer(zeroed_memory(num_bytes), dtype=torch.uint8)


def pack(
    library: Library,
    weight: Tensor,
    *,
    is_gate_up: bool = False,
    inputs: int = 0,
    room: Callable[[int], Tensor] = own_pages,
    num_threads: int | None = None,
) -> Packed:
    """Pack a weight into panels; the last panel is padded with zeros.

    Args:
      library: packs, and sets the width of a panel.
      weight: [out, in], fp32 or bf16.
      is_gate_up: whether the first half of the outputs are gates; each panel then holds some gates
        followed by their ups.
      inputs: least number of inputs; added weights are zero.
      room: allocates memory for the panels.
      num_threads: number of threads; None for as many as torch uses.
    """
    per_word = WORD_BYTES // weight.element_size()
    if weight.shape[1] % per_word:
        weight = F.pad(weight, (0, 1))
    weight = weight.contiguous()
    halves = 2 if is_gate_up else 1
    panels = -(-(len(weight) // halves) // (library.panel // halves))
    steps = -(-max(weight.shape[1], inputs) // per_word)
    width = library.panel * WORD_BYTES
    packed = room(panels * steps * width).view(panels, steps, width)
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
    )
    library.pack(fields, num_threads or torch.get_num_threads())
    return Packed(packed, panels, steps)


def pack_blocks(
    library: Library,
    parts: Sequence[Blocks],
    dtype: torch.dtype,
    *,
    is_gate_up: bool = False,
    room: Callable[[int], Tensor] = own_pages,
    num_threads: int | None = None,
) -> Packed:
    """Pack a quantised weight into strips, without changing the bits of its blocks.

    Args:
      library: packs, and sets the width of a strip.
      parts: the outputs in parts. All but the last part fill whole strips, unless the parts are
        gates and ups, whose strips alternate.
      dtype: dtype of the input.
      is_gate_up: whether the parts are gates and ups.
      room: allocates memory for the strips.
      num_threads: number of threads; None for as many as torch uses.

    Raises:
      ModelError: a scale is not finite.
    """
    lanes, inputs = library.panel // 2, parts[0].inputs
    counts = [-(-len(one.rows) // lanes) for one in parts]
    panels = -(-sum(counts) // 2)
    counts[-1] += sum(counts) % 2  # half a panel of zeros
    firsts = [0, 1] if is_gate_up else np.cumsum([0, *counts]).tolist()
    every = len(parts) if is_gate_up else 1
    strips = np.zeros((2 * panels, 2), dtype=np.int64)
    for one, first, count in zip(parts, firsts, counts, strict=False):
        strips[first : first + count * every : every, 0] = one.form
    sizes = [library.strip_bytes(form, inputs) for form in strips[:, 0].tolist()]
    strips[:, 1] = np.cumsum([0, *sizes[:-1]])
    packed = room(sum(sizes))
    for one, first, count in zip(parts, firsts, counts, strict=False):
        rows = np.ascontiguousarray(one.rows)
        fields = GroupPackingFields(
            outputs=len(rows),
            inputs=inputs,
            blocks=rows.ctypes.data,
            row_bytes=rows.shape[1],
            num_strips=count,
            every=every,
            strips=strips[first:].ctypes.data,
            packed=packed.data_ptr(),
        )
        bad = library.pack_groups(fields, num_threads or torch.get_num_threads())
        if bad:
            raise ModelError(
                f"{one.name} has {bad} scales that are not finite; fetch the file again, or use "
                "another quantisation of the model"
            )
    return Packed(packed, panels, inputs * dtype.itemsize // WORD_BYTES, torch.from_numpy(strips))


def pack_bias(bias: Tensor, panel: int, *, is_gate_up: bool = False) -> Tensor:
    """Return a bias in the order of its packed weight's outputs: fp32, padded to whole panels."""
    if not is_gate_up:
        return F.pad(bias.float(), (0, -len(bias) % panel))
    half = panel // 2
    missing = -(len(bias) // 2) % half
    gate, up = (F.pad(part.float(), (0, missing)).view(-1, half) for part in bias.chunk(2))
    return torch.stack((gate, up), 1).flatten()
