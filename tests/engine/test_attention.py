"""Tests of the attention backends: each computes softmax attention over the blocks of the block
tables, and unsupported settings are refused."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest
import torch

from engine.attention import flash, sdpa, triton
from engine.attention.registry import backend_traits, create_attention
from engine.attention.row_groups import group_rows
from engine.attention.sdpa import SdpaAttention
from engine.batch import FlatStep, StepRow, flatten
from engine.kv_pool import KVLayout, KVPool
from triolet.config import Dtype
from triolet.errors import ConfigError

from .kernels import attention_of_one

if TYPE_CHECKING:
    from engine.attention.traits import BackendTraits

CPU = torch.device("cpu")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
MAX_LEN = 800


def mixed_step(block_size: int) -> FlatStep:
    """Return a step of decode rows and chunks, short and long, over scattered blocks."""
    free = iter(torch.randperm(299).add(1).tolist())
    lengths = [(1, 0), (1, 90), (70, 0), (1, 255), (33, 600), (3, 256), (1, 40)]
    decoding = (1, 3)
    rows = []
    for index, (num_tokens, start) in enumerate(lengths):
        blocks = [next(free) for _ in range(-(-(start + num_tokens) // block_size))]
        rows.append(StepRow([0] * num_tokens, start, blocks, is_decode=index in decoding))
    return flatten(rows, block_size)


def run(backend: SdpaAttention, pool: KVPool, step: FlatStep) -> None:
    """Compare a backend's output, row by row, with explicit attention over the pool."""
    num_tokens = len(step.token_ids)
    for layer in range(2):
        query = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM)
        key = torch.randn(num_tokens, NUM_KV_HEADS, HEAD_DIM)
        value = torch.randn(num_tokens, NUM_KV_HEADS, HEAD_DIM)
        untouched = pool.blocks[:, 1 - layer].clone()
        backend.plan(step)
        output = backend.attend(layer, query, key, value)
        assert torch.equal(pool.blocks[:, 1 - layer], untouched)
        assert output.shape == query.shape
        assert output.isfinite().all()
        for token, (block, offset) in enumerate(step.slots):
            assert torch.equal(pool.blocks[block, layer, 0, offset], key[token])
            assert torch.equal(pool.blocks[block, layer, 1, offset], value[token])
        for row, seq_len in enumerate(step.seq_lens):
            own = slice(*step.query_start_loc[row : row + 2])
            cached = pool.blocks[list(step.block_tables[row]), layer]
            keys, values = cached.transpose(0, 1).flatten(1, 2)[:, :seq_len]
            expected = attention_of_one(query[own], keys, values, HEAD_DIM**-0.5)
            torch.testing.assert_close(output[own], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("block_size", [16, 7])
def test_sdpa_is_explicit_attention(block_size: int) -> None:
    torch.manual_seed(1)
    layout = KVLayout(2, block_size, NUM_KV_HEADS, HEAD_DIM, torch.float32)
    pool = KVPool(layout, 300, CPU)
    pool.blocks.normal_()
    run(SdpaAttention(pool, NUM_HEADS, MAX_LEN), pool, mixed_step(block_size))


def test_the_reference_computes_where_its_inputs_are() -> None:
    """The device `meta`, like a GPU, cannot be mixed with another device."""
    query = torch.empty(3, 4, 8, device="meta")
    keys = torch.empty(5, 2, 8, device="meta")
    assert attention_of_one(query, keys, keys, 1.0).device.type == "meta"


def test_rows_are_parted_by_kernel() -> None:
    rows = [
        StepRow([1, 2, 3], 300, [4, 5]),
        StepRow([1], 256, [8, 6, 7], is_decode=True),
        StepRow([1], 5, [9], is_decode=True),
    ]
    step = flatten(rows, 256)
    decode, prefill = group_rows(step, is_decode=True), group_rows(step, is_decode=False)
    assert decode is not None
    assert prefill is not None
    assert decode.tokens.tolist() == [3, 4]
    assert decode.block_table.tolist() == [[8, 6], [9, 0]]
    assert decode.seq_lens.tolist() == [257, 6]
    assert prefill.tokens.tolist() == [0, 1, 2]
    assert prefill.query_start_loc.tolist() == [0, 3]
    assert prefill.key_start_loc.tolist() == [0, 303]
    assert (prefill.max_query_len, prefill.max_seq_len) == (3, 303)
    assert group_rows(flatten(rows[1:], 256), is_decode=False) is None


@pytest.mark.parametrize(
    ("backend", "package", "block_size", "words"),
    [
        ("flash", "flash_attn", 256, r"install the extra `flash` .* or use backend 'tri"),
        ("triton", "triton", 16, r"install a CUDA build of torch, .* or use backend 'sd"),
    ],
)
def test_a_backend_without_its_package_says_what_to_do(
    backend: str, package: str, block_size: int, words: str
) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    pool = KVPool(KVLayout(1, block_size, 1, 8, torch.bfloat16), 2, CPU)
    with pytest.raises(ConfigError, match=words):
        create_attention(backend, pool, 1, 256)


@pytest.mark.parametrize(
    ("traits", "device", "dtype", "block_size", "head_dim", "text"),
    [
        (flash.TRAITS, "cpu", Dtype.BFLOAT16, 256, 64, "device is 'cpu'; allowed: cuda"),
        (flash.TRAITS, "cuda", Dtype.FLOAT32, 256, 64, "dtype is 'float32'; allowed: bfloat16"),
        (flash.TRAITS, "cuda", Dtype.BFLOAT16, 16, 64, "block_size is 16; allowed: multiples of 2"),
        (flash.TRAITS, "cuda", Dtype.BFLOAT16, 512, 260, "head_dim of the model is 260"),
        (triton.TRAITS, "cpu", Dtype.BFLOAT16, 16, 64, "device is 'cpu'; allowed: cuda"),
        (triton.TRAITS, "cuda", Dtype.BFLOAT16, 16, 512, "head_dim of the model is 512"),
        (sdpa.TRAITS, "mps", Dtype.FLOAT32, 16, 64, "device is 'mps'; allowed: cpu, cuda"),
        (sdpa.TRAITS, "cpu", Dtype.FLOAT32, 16, 15, "head_dim of the model is 15"),
    ],
)
def test_settings_that_a_backend_cannot_serve_are_refused(
    traits: BackendTraits, device: str, dtype: Dtype, block_size: int, head_dim: int, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        traits.check(device, dtype, block_size, head_dim)
    assert text in str(caught.value)


def test_settings_that_a_backend_can_serve_pass() -> None:
    sdpa.TRAITS.check("cpu", Dtype.BFLOAT16, 1, 80)
    flash.TRAITS.check("cuda", Dtype.BFLOAT16, 512, 128)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="backend is 'xla'; allowed: flash, sdpa, triton"):
        backend_traits("xla")
