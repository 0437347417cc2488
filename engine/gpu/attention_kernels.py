"""Paged attention kernels in Triton: split decode (one token per row), and prefill chunks.

The order of every sum depends on the sequence alone: keys are read in tiles from position 0 (in
decode, from the start of a split of fixed size), there are no atomics, and splits are combined
first to last. A row's bits therefore do not depend on other rows of the batch, nor on how its
prompt was cut into chunks.

Source: FlashAttention's online softmax (Dao et al. 2022) and Flash-Decoding's splits (Dao et al.
2023).
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl


@triton.jit
def places_of(
    table: tl.tensor,
    positions: tl.tensor,
    is_key: tl.tensor,
    key_head: tl.tensor,
    block_stride: int,
    block_size: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
) -> tl.tensor:
    """Return the offsets in the pool of one head's keys at some positions."""
    blocks = tl.load(table + positions // block_size, mask=is_key, other=0)
    places = blocks.to(tl.int64) * block_stride
    return places + ((positions % block_size) * num_kv_heads + key_head) * head_dim


@triton.jit
def attend_tile(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    cells: tl.tensor,
    is_cell: tl.tensor,
    is_seen: tl.tensor,
    scale: float,
    largest: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    precision: tl.constexpr,
    operand: tl.constexpr,
) -> tl.tensor:
    """Add a tile of keys to a running softmax: largest score, sum of weights, weighted values."""
    key = tl.load(keys + cells, mask=is_cell, other=0.0).to(operand)
    scores = tl.dot(queries, tl.trans(key), input_precision=precision) * scale
    scores = tl.where(is_seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    shrink = tl.exp2(largest - new_largest)
    share = tl.exp2(scores - new_largest[:, None])
    total = total * shrink + tl.sum(share, 1)
    value = tl.load(values + cells, mask=is_cell, other=0.0).to(operand)
    product = tl.dot(share.to(operand), value, input_precision=precision)
    return new_largest, total, weighted * shrink[:, None] + product


# Block tables are as wide as the longest row of a step. Triton would compile separate kernels for
# width 1, multiples of 16 and all others, taking seconds each while requests wait.
@triton.jit(do_not_specialize=["table_stride"])
def decode_splits_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    seq_lens: tl.tensor,
    tokens: tl.tensor,
    partial: tl.tensor,
    weights: tl.tensor,
    scale: float,
    block_stride: int,
    table_stride: int,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    split_tokens: tl.constexpr,
    max_splits: tl.constexpr,
    tile: tl.constexpr,
    precision: tl.constexpr,
    operand: tl.constexpr,
) -> None:
    """Attend one row's token to some of its splits, for the query heads that share a key head.

    Grid: rows, key heads, programs that share a row's splits. `scale` includes log2(e). Writes
    weighted values [rows, heads, max_splits, head_dim], largest scores and sums of weights.
    """
    row, key_head = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens + row)
    members, dims = tl.arange(0, padded_group), tl.arange(0, padded_dim)
    is_dim = (dims < head_dim)[None, :]
    is_query = (members < group)[:, None] & is_dim
    heads = key_head * group + members
    first = tl.load(tokens + row).to(tl.int64) * (num_kv_heads * group)
    cells = (first + heads)[:, None] * head_dim + dims[None, :]
    queries = tl.load(query + cells, mask=is_query, other=0.0).to(operand)
    for split in range(tl.program_id(2), tl.cdiv(seq_len, split_tokens), tl.num_programs(2)):
        largest = tl.full([padded_group], float("-inf"), tl.float32)
        total = tl.zeros([padded_group], tl.float32)
        weighted = tl.zeros([padded_group, padded_dim], tl.float32)
        end = tl.minimum((split + 1) * split_tokens, seq_len)
        for start in range(split * split_tokens, end, tile):
            positions = start + tl.arange(0, tile)
            is_key = positions < end
            places = places_of(
                tables + row * table_stride, positions, is_key, key_head,
                block_stride, block_size, num_kv_heads, head_dim,
            )  # fmt: skip
            largest, total, weighted = attend_tile(
                queries, keys, values, places[:, None] + dims[None, :], is_key[:, None] & is_dim,
                is_key[None, :], scale, largest, total, weighted, precision, operand,
            )  # fmt: skip
        sums = (row * (num_kv_heads * group) + heads).to(tl.int64) * max_splits + split
        tl.store(partial + sums[:, None] * head_dim + dims[None, :], weighted, mask=is_query)
        tl.store(weights + sums * 2, largest, mask=members < group)
        tl.store(weights + sums * 2 + 1, total, mask=members < group)


@triton.jit
def combine_splits_kernel(
    partial: tl.tensor,
    weights: tl.tensor,
    seq_lens: tl.tensor,
    tokens: tl.tensor,
    output: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    split_tokens: tl.constexpr,
    max_splits: tl.constexpr,
) -> None:
    """Add up a row's splits, first to last. Grid: rows, query heads."""
    row, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, padded_dim)
    is_dim = dims < head_dim
    place = (row * num_heads + head).to(tl.int64) * max_splits
    largest = tl.load(weights + place * 2)
    total = tl.load(weights + place * 2 + 1)
    weighted = tl.load(partial + place * head_dim + dims, mask=is_dim, other=0.0)
    for split in range(1, tl.cdiv(tl.load(seq_lens + row), split_tokens)):
        other = tl.load(weights + (place + split) * 2)
        other_total = tl.load(weights + (place + split) * 2 + 1)
        cells = partial + (place + split) * head_dim + dims
        other_weighted = tl.load(cells, mask=is_dim, other=0.0)
        new_largest = tl.maximum(largest, other)
        shrink = tl.exp2(largest - new_largest)
        other_shrink = tl.exp2(other - new_largest)
        total = total * shrink + other_total * other_shrink
        weighted = weighted * shrink + other_weighted * other_shrink
        largest = new_largest
    target = (tl.load(tokens + row).to(tl.int64) * num_heads + head) * head_dim + dims
    tl.store(output + target, (weighted / total).to(output.dtype.element_ty), mask=is_dim)


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    tiles: tl.tensor,
    output: tl.tensor,
    scale: float,
    block_stride: int,
    table_stride: int,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile: tl.constexpr,
    precision: tl.constexpr,
    operand: tl.constexpr,
) -> None:
    """Attend a tile of a prompt's tokens, for the query heads that share a key head.

    Grid: tiles of tokens, key heads. `tiles` is int32 [n, 4]: row of the block table, index of the
    first token in the step, its position, number of tokens. `scale` includes log2(e).
    """
    plan = tiles + tl.program_id(0) * 4
    row, first_token = tl.load(plan), tl.load(plan + 1)
    first_position, num_tokens = tl.load(plan + 2), tl.load(plan + 3)
    key_head = tl.program_id(1)
    lanes, dims = tl.arange(0, tile_tokens * padded_group), tl.arange(0, padded_dim)
    offsets, members = lanes // padded_group, lanes % padded_group
    is_dim = (dims < head_dim)[None, :]
    is_query = ((offsets < num_tokens) & (members < group))[:, None] & is_dim
    heads = (first_token + offsets).to(tl.int64) * (num_kv_heads * group) + key_head * group
    cells = (heads + members)[:, None] * head_dim + dims[None, :]
    queries = tl.load(query + cells, mask=is_query, other=0.0).to(operand)
    # A lane without a token repeats the last token, so that nothing is divided by zero.
    positions = first_position + tl.minimum(offsets, num_tokens - 1)
    largest = tl.full([tile_tokens * padded_group], float("-inf"), tl.float32)
    total = tl.zeros([tile_tokens * padded_group], tl.float32)
    weighted = tl.zeros([tile_tokens * padded_group, padded_dim], tl.float32)
    end = first_position + num_tokens
    for start in range(0, end, tile):
        key_positions = start + tl.arange(0, tile)
        is_key = key_positions < end
        places = places_of(
            tables + row * table_stride, key_positions, is_key, key_head,
            block_stride, block_size, num_kv_heads, head_dim,
        )  # fmt: skip
        largest, total, weighted = attend_tile(
            queries, keys, values, places[:, None] + dims[None, :], is_key[:, None] & is_dim,
            key_positions[None, :] <= positions[:, None], scale,
            largest, total, weighted, precision, operand,
        )  # fmt: skip
    attended = (weighted / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + cells, attended, mask=is_query)


IS_INTERPRETED: Final = not isinstance(prefill_kernel, triton.JITFunction)
"""Whether kernels run in Triton's interpreter on the CPU."""
