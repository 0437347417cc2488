"""Tests of packing weights into panels for the C kernels: each number is stored exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from engine.native.packing import Packed, pack, pack_bias

if TYPE_CHECKING:
    from torch import Tensor

    from engine.native.library import Library

DTYPES = (torch.float32, torch.bfloat16)


def unpacked(packed: Packed, panel: int, dtype: torch.dtype) -> Tensor:
    """Return the unpacked weight, [whole panels of outputs, inputs]."""
    per_word = 4 // dtype.itemsize
    numbers = packed.weight.view(dtype).view(packed.panels, packed.steps, panel, per_word)
    return numbers.transpose(1, 2).reshape(packed.panels * panel, packed.steps * per_word)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_weight_holds_every_number_once(library: Library, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for outputs, inputs in ((5, 6), (library.panel, 16), (3 * library.panel + 7, 70)):
        weight = torch.randn(outputs, inputs).to(dtype)
        packed = pack(library, weight, inputs=inputs + 10)
        assert packed.panels == -(-outputs // library.panel)
        numbers = unpacked(packed, library.panel, dtype)
        assert numbers.shape[1] == inputs + 10
        assert torch.equal(numbers[:outputs, :inputs], weight)
        assert not numbers[outputs:].any()
        assert not numbers[:, inputs:].any()
    odd = pack(library, torch.ones(2, 5, dtype=dtype))
    assert unpacked(odd, library.panel, dtype)[:2].sum() == 10


def test_packed_weights_lie_where_large_pages_are_allowed(library: Library) -> None:
    packed = pack(library, torch.ones(512, 4096))
    address = packed.weight.data_ptr()
    if not Path("/proc/self/maps").exists():
        pytest.skip("this system does not show a process's memory")
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions = line.split()[:2]
        first, end = (int(part, 16) for part in span.split("-"))
        if first <= address < end:
            assert permissions == "rw-p", "shared memory has small pages only"
            return
    raise AssertionError("it lies nowhere")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_share_their_panel_with_their_ups(library: Library, dtype: torch.dtype) -> None:
    half = library.panel // 2
    gates = half + 3  # the second panel has only three gates and their ups
    weight = torch.arange(1.0, 2 * gates + 1).view(-1, 1).expand(-1, 2).to(dtype)
    packed = pack(library, weight, is_gate_up=True)
    assert packed.panels == 2
    order = unpacked(packed, library.panel, dtype)[:, 0].view(2, 2, half)
    numbers = weight[:, 0]
    assert torch.equal(order[0], torch.stack((numbers[:half], numbers[gates : gates + half])))
    assert torch.equal(order[1, :, :3], torch.stack((numbers[half:gates], numbers[-3:])))
    assert not order[1, :, 3:].any()
    assert torch.equal(pack_bias(numbers, library.panel, is_gate_up=True), order.flatten().float())
    assert torch.equal(
        pack_bias(numbers, library.panel),
        unpacked(pack(library, weight), library.panel, dtype)[:, 0].float(),
    )
