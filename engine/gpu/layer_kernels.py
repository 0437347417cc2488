"""Fused Triton kernels for the operations between a layer's matrix products.

Norms, activation, rotation and storing KV each take one pass over memory. Every program handles one
row of the step or a part of one, computes in fp32, and rounds where torch's operations would, so a
row never depends on other rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from ..layers import RMSNorm


SILU_COLUMNS: Final = 1024


@triton.jit
def add_norm_kernel(
    delta: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    eps: float,
    size: tl.constexpr,
    block: tl.constexpr,
    adds: tl.constexpr,
) -> None:
    """Add to the residual stream in place and normalise the sum. Grid: rows."""
    columns = tl.arange(0, block)
    inside = columns < size
    cells = tl.program_id(0).to(tl.int64) * size + columns
    summed = tl.load(residual + cells, mask=inside, other=0.0).to(tl.float32)
    if adds:
        summed += tl.load(delta + cells, mask=inside, other=0.0).to(tl.float32)
        rounded = summed.to(residual.dtype.element_ty)
        tl.store(residual + cells, rounded, mask=inside)
        summed = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(summed * summed, 0) / size + eps)
    scaled = summed * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + cells, scaled.to(output.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(
    gate_up: tl.tensor, output: tl.tensor, size: tl.constexpr, block: tl.constexpr
) -> None:
    """Multiply silu(gate) by up. Grid: rows, blocks of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < size
    cells = gate_up + row * (2 * size) + columns
    gate = tl.load(cells, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(cells + size, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(output.dtype.element_ty).to(tl.float32)
    product = (activated * up).to(output.dtype.element_ty)
    tl.store(output + row * size + columns, product, mask=inside)


@triton.jit
def norm_halves(
    first: tl.tensor,
    second: tl.tensor,
    weight: tl.tensor,
    columns: tl.tensor,
    eps: float,
    half: tl.constexpr,
) -> tl.tensor:
    """Normalise one head, given as two halves, in fp32, rounded to the head's dtype."""
    inside = columns < half
    dtype = first.dtype
    first_float, second_float = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(first_float * first_float + second_float * second_float, 0)
    scale = tl.rsqrt(squares / (2 * half) + eps)
    first_weight = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    second_weight = tl.load(weight + half + columns, mask=inside, other=0.0).to(tl.float32)
    first_float = (first_float * scale * first_weight).to(dtype)
    second_float = (second_float * scale * second_weight).to(dtype)
    return first_float, second_float


@triton.jit
def rotate_store_kernel(
    heads: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    eps: float,
    block_stride: int,
    token_stride: int,
    head_stride: int,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
    block_size: tl.constexpr,
    norms: tl.constexpr,
) -> None:
    """Normalise and rotate one head of a token; write queries to `query`, keys and values to the
    pool.

    Grid: tokens, all heads. `heads` is [T, num_heads + 2 * num_kv_heads, 2 * half].
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, padded_half)
    inside = columns < half
    source = heads + (token * (num_heads + 2 * num_kv_heads) + head) * (2 * half) + columns
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + half, mask=inside, other=0.0)
    if head < num_heads + num_kv_heads:
        if norms:
            weight = query_norm
            if head >= num_heads:
                weight = key_norm
            first, second = norm_halves(first, second, weight, columns, eps, half)
        first_float, second_float = first.to(tl.float32), second.to(tl.float32)
        angle = tl.load(positions + token) * half + columns
        cosine = tl.load(cosines + angle, mask=inside, other=0.0)
        sine = tl.load(sines + angle, mask=inside, other=0.0)
        first = (first_float * cosine - second_float * sine).to(query.dtype.element_ty)
        second = (second_float * cosine + first_float * sine).to(query.dtype.element_ty)
    slot = tl.load(slots + token)
    place = (slot // block_size) * block_stride + (slot % block_size) * token_stride
    if head < num_heads:
        target = query + (token * num_heads + head) * (2 * half)
    elif head < num_heads + num_kv_heads:
        target = keys + place + (head - num_heads) * head_stride
    else:
        target = values + place + (head - num_heads - num_kv_heads) * head_stride
    tl.store(target + columns, first, mask=inside)
    tl.store(target + half + columns, second, mask=inside)


def add_norm(delta: Tensor | None, residual: Tensor, norm: RMSNorm) -> Tensor:
    """Add `delta` (if any) to `residual` in place and return the normalised sum [T, size]."""
    rows, size = residual.shape
    output = torch.empty_like(residual)
    add_norm_kernel[(rows,)](
        residual if delta is None else delta,
        residual,
        norm.weight,
        output,
        norm.eps,
        size,
        triton.next_power_of_2(size),
        delta is not None,
        num_warps=8 if size > 2048 else 4,
    )
    return output


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up: [T, 2 * size] -> [T, size]."""
    rows, width = gate_up.shape
    output = gate_up.new_empty(rows, width // 2)
    grid = (rows, triton.cdiv(width // 2, SILU_COLUMNS))
    silu_mul_kernel[grid](gate_up, output, width // 2, SILU_COLUMNS)
    return output


def rotate_store(
    heads: Tensor,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    norms: tuple[RMSNorm, RMSNorm] | None,
    cache: Tensor,
) -> Tensor:
    """Rotate queries and keys, and store keys and values in one layer of the pool.

    Args:
      heads: [T, num_heads + 2 * num_kv_heads, head_dim], the product's output.
      tables: cosines and sines of all positions, fp32 [max_model_len, head_dim / 2].
      positions: int64 [T].
      slots: int64 [T], block * block_size + offset; padding points into the scratch block.
      norms: norms of queries and keys, if the model has them.
      cache: the layer's KV, [num_blocks, 2, block_size, num_kv_heads, head_dim].

    Returns:
      The queries, [T, num_heads, head_dim].
    """
    num_tokens, num_all, head_dim = heads.shape
    _, _, block_size, num_kv_heads, _ = cache.shape
    num_heads = num_all - 2 * num_kv_heads
    query = heads.new_empty(num_tokens, num_heads, head_dim)
    query_norm, key_norm = norms or (None, None)
    rotate_store_kernel[(num_tokens, num_all)](
        heads,
        *tables,
        positions,
        slots,
        heads if query_norm is None else query_norm.weight,
        heads if key_norm is None else key_norm.weight,
        query,
        cache[:, 0],
        cache[:, 1],
        0.0 if query_norm is None else query_norm.eps,
        cache.stride(0),
        cache.stride(2),
        cache.stride(3),
        num_heads,
        num_kv_heads,
        head_dim // 2,
        triton.next_power_of_2(head_dim // 2),
        block_size,
        query_norm is not None,
        num_warps=1,
    )
    return query
