"""Tests of the fused layer kernels (add and norm, SiLU, rotary): results equal torch's separate
operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.layers import RMSNorm
from engine.rope import rotate

DTYPES = [torch.float32, torch.bfloat16]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare tensors; the interpreter truncates bf16 where a GPU rounds, once per operation."""
    tolerance = 2e-6 if expected.dtype is torch.float32 else 3e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds", [True, False])
def test_add_and_norm(device: torch.device, dtype: torch.dtype, adds: bool) -> None:
    from engine.gpu.layer_kernels import add_norm

    torch.manual_seed(1)
    residual = torch.randn(5, 96, device=device).to(dtype)
    delta = torch.randn(5, 96, device=device).to(dtype) if adds else None
    norm = RMSNorm(torch.randn(96, device=device).to(dtype), 1e-5)
    summed = residual if delta is None else residual + delta
    actual = add_norm(delta, residual, norm)
    close(residual, summed)
    close(actual, norm(summed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_of_the_gate_times_up(device: torch.device, dtype: torch.dtype) -> None:
    from engine.gpu.layer_kernels import silu_mul

    torch.manual_seed(2)
    gate_up = (torch.randn(3, 2 * 1100, device=device) * 3).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    close(silu_mul(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [True, False])
def test_heads_are_normed_rotated_and_stored(
    device: torch.device, dtype: torch.dtype, has_norms: bool
) -> None:
    from engine.gpu.layer_kernels import rotate_store

    torch.manual_seed(3)
    num_heads, num_kv_heads, head_dim, block_size = 6, 2, 24, 4
    heads = torch.randn(5, num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    cosines, sines = torch.randn(2, 50, head_dim // 2, device=device).unbind(0)
    positions = torch.tensor([7, 49, 0, 3, 0], device=device)
    slots = torch.tensor([9, 30, 31, 12, 0], device=device)
    norms = None
    if has_norms:
        weights = torch.randn(2, head_dim, device=device).to(dtype)
        norms = (RMSNorm(weights[0], 1e-6), RMSNorm(weights[1], 1e-6))
    pool = torch.zeros(8, 3, 2, block_size, num_kv_heads, head_dim, device=device, dtype=dtype)
    query = rotate_store(heads, (cosines, sines), positions, slots, norms, pool[:, 1])

    expected = heads.clone()
    keys = expected[:, num_heads : num_heads + num_kv_heads]
    if norms is not None:
        expected[:, :num_heads] = norms[0](expected[:, :num_heads])
        keys.copy_(norms[1](keys))
    rotate(
        expected[:, : num_heads + num_kv_heads],
        cosines[positions].unsqueeze(1),
        sines[positions].unsqueeze(1),
    )
    close(query, expected[:, :num_heads])
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        close(pool[block, 1, 0, offset], keys[token])
        assert torch.equal(pool[block, 1, 1, offset], heads[token, num_heads + num_kv_heads :])
    assert int(pool[:, [0, 2]].count_nonzero()) == 0
    assert int((pool[:, 1] != 0).any(-1).sum()) == 5 * 2 * num_kv_heads
