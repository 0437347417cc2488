"""Tests of the Triton attention kernels against explicit softmax attention; a row has the same bits
in every batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

from engine.attention.registry import create_attention
from engine.attention.triton import programs_for, split_tokens_for
from engine.batch import StepRow, flatten
from engine.kv_pool import KVLayout, KVPool
from tests.engine.kernels import attention_of_one

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.attention.interface import AttentionBackend
    from engine.batch import FlatStep

MAX_LEN = 640


class Case(NamedTuple):
    """A shape of heads and blocks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


GROUPED = Case(4, 2, 16, 16)
ODD = Case(9, 3, 24, 7)


def filled_pool(case: Case, device: torch.device, dtype: torch.dtype = torch.float32) -> KVPool:
    layout = KVLayout(2, case.block_size, case.num_kv_heads, case.head_dim, dtype)
    pool = KVPool(layout, 300, device)
    pool.blocks.normal_()
    return pool


def scattered(rows: Sequence[tuple[int, int, bool]], block_size: int) -> list[StepRow]:
    """Return rows of (tokens, start, is_decode), over blocks in no order."""
    free = iter(torch.randperm(299).add(1).tolist())
    return [
        StepRow(
            [0] * num_tokens,
            start,
            [next(free) for _ in range(-(-(start + num_tokens) // block_size))],
            is_decode=is_decode,
        )
        for num_tokens, start, is_decode in rows
    ]


def attend(
    backend: AttentionBackend, step: FlatStep, inputs: Sequence[torch.Tensor]
) -> torch.Tensor:
    backend.plan(step)
    return backend.attend(1, *inputs)


@pytest.mark.parametrize("case", [GROUPED, ODD])
def test_a_mixed_step_is_explicit_attention(device: torch.device, case: Case) -> None:
    torch.manual_seed(1)
    pool = filled_pool(case, device)
    backend = create_attention("triton", pool, case.num_heads, MAX_LEN)
    rows = [(1, 0, True), (1, 600, True), (1, 255, True), (1, 256, True), (70, 0, False)]
    rows += [(1, 63, False), (33, 300, False)]
    step = flatten(scattered(rows, case.block_size), case.block_size)
    num_tokens = len(step.token_ids)
    query = torch.randn(num_tokens, case.num_heads, case.head_dim, device=device)
    key, value = torch.randn(2, num_tokens, case.num_kv_heads, case.head_dim, device=device)
    output = attend(backend, step, (query, key, value))
    assert output.shape == query.shape
    assert output.isfinite().all()
    for row, seq_len in enumerate(step.seq_lens):
        own = slice(*step.query_start_loc[row : row + 2])
        cached = pool.blocks[list(step.block_tables[row]), 1]
        keys, values = cached.transpose(0, 1).flatten(1, 2)[:, :seq_len]
        expected = attention_of_one(query[own], keys, values, case.head_dim**-0.5)
        torch.testing.assert_close(output[own], expected, rtol=0, atol=3e-6)


def test_a_decode_row_has_the_same_bits_in_every_batch(device: torch.device) -> None:
    torch.manual_seed(2)
    pool = filled_pool(GROUPED, device)
    backend = create_attention("triton", pool, 4, MAX_LEN)
    rows = scattered([(1, n, True) for n in (530, 2, 300, 17, 100)], 16)
    query = torch.randn(8, 4, 16, device=device)
    key, value = torch.randn(2, 8, 2, 16, device=device)
    together = attend(backend, flatten(rows, 16), (query, key, value))
    for index, row in enumerate(rows):
        inputs = [tensor[[index] * 4] for tensor in (query, key, value)]
        alone = attend(backend, flatten([row], 16), inputs)
        assert torch.equal(alone[0], together[index])


def test_a_prompt_has_the_same_bits_however_it_is_cut(device: torch.device) -> None:
    torch.manual_seed(3)
    pool = filled_pool(GROUPED, device)
    backend = create_attention("triton", pool, 4, MAX_LEN)
    [whole] = scattered([(152, 0, False)], 16)
    inputs = [torch.randn(152, heads, 16, device=device) for heads in (4, 2, 2)]
    expected = attend(backend, flatten([whole], 16), inputs)
    # The interpreter uses numpy's products; their bits depend on a row's place in a tile.
    cuts = [(32, 96, 24)] if device.type == "cpu" else [(32, 96, 24), (4, 68, 8, 72)]
    for lengths in cuts:
        start = 0
        for length in lengths:
            row = StepRow([0] * length, start, whole.block_table)
            own = [tensor[start : start + length] for tensor in inputs]
            assert torch.equal(
                attend(backend, flatten([row], 16), own), expected[start : start + length]
            )
            start += length


def test_bf16_is_explicit_attention(device: torch.device) -> None:
    torch.manual_seed(4)
    pool = filled_pool(GROUPED, device, torch.bfloat16)
    backend = create_attention("triton", pool, 4, MAX_LEN)
    step = flatten(scattered([(1, 300, True), (40, 20, False)], 16), 16)
    query = torch.randn(44, 4, 16, device=device).bfloat16()
    key, value = torch.randn(2, 44, 2, 16, device=device).bfloat16()
    output = attend(backend, step, (query, key, value))
    for row, seq_len in enumerate(step.seq_lens):
        own = slice(*step.query_start_loc[row : row + 2])
        cached = pool.blocks[list(step.block_tables[row]), 1]
        keys, values = cached.transpose(0, 1).flatten(1, 2)[:, :seq_len].float()
        expected = attention_of_one(query[own].float(), keys, values, 16**-0.5)
        torch.testing.assert_close(output[own].float(), expected, rtol=0.02, atol=0.02)


def test_what_lies_beyond_a_sequence_is_never_read(device: torch.device) -> None:
    torch.manual_seed(5)
    pool = filled_pool(GROUPED, device)
    pool.poison(range(300))
    backend = create_attention("triton", pool, 4, MAX_LEN)
    rows = scattered([(5, 0, False), (1, 0, True)], 16)
    inputs = [torch.randn(8, heads, 16, device=device) for heads in (4, 2, 2)]
    assert attend(backend, flatten(rows, 16), inputs).isfinite().all()


def test_splits_do_not_depend_on_the_batch() -> None:
    assert split_tokens_for(2_048) == 256
    assert split_tokens_for(131_072) == 2_048
    assert split_tokens_for(100_000) % 64 == 0
    assert programs_for(1, 8, 64) == 64
    assert programs_for(256, 8, 64) == 1
