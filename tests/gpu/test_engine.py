"""The real kernels on a real NVIDIA GPU, against explicit attention and against the CPU."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest
import torch

from engine.attention.registry import create_attention
from engine.batch import StepRow, flatten
from engine.kv_pool import KVLayout, KVPool
from engine.load import load_engine
from tests.engine.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.engine.driver import GREEDY, Running, decode, exported, generate, ids, prefill
from tests.engine.kernels import attention_of_one
from triolet.config import Dtype, EngineConfig
from triolet.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]
needs_flash_attn = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed"
)
PROMPTS = [[(7 * i + n) % VOCAB_SIZE for i in range(n)] for n in (1, 16, 17, 300)]


@pytest.mark.parametrize("backend", ["sdpa", pytest.param("flash", marks=needs_flash_attn)])
def test_attention_on_the_gpu_is_explicit_attention(backend: str) -> None:
    torch.manual_seed(4)
    gpu = torch.device("cuda")
    pool = KVPool(KVLayout(2, 256, 2, 64, torch.bfloat16), 12, gpu)
    pool.blocks.normal_()
    attention = create_attention(backend, pool, 8, 1024)
    rows = [
        StepRow([0], 700, [3, 9, 1], is_decode=True),
        StepRow([0] * 40, 280, [2, 5]),
        StepRow([0] * 300, 0, [7, 4]),
        StepRow([0], 255, [8], is_decode=True),
    ]
    step = flatten(rows, 256)
    query = torch.randn(len(step.token_ids), 8, 64, dtype=torch.bfloat16, device=gpu)
    key = torch.randn(len(step.token_ids), 2, 64, dtype=torch.bfloat16, device=gpu)
    attention.plan(step)
    output = attention.attend(1, query, key, key)
    for row, seq_len in enumerate(step.seq_lens):
        own = slice(*step.query_start_loc[row : row + 2])
        cached = pool.blocks[list(step.block_tables[row]), 1]
        keys, values = cached.transpose(0, 1).flatten(1, 2)[:, :seq_len].cpu()
        expected = attention_of_one(query[own].cpu().float(), keys, values, 64**-0.5)
        torch.testing.assert_close(output[own].cpu().float(), expected, rtol=0.02, atol=0.02)


def test_fp32_on_the_gpu_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "qwen3", "qwen3")
    config = EngineConfig(device="cuda", kv_pool_bytes=16 * MIB)
    engine = load_engine(checkpoint.path, config, lambda *_: None)
    expected = [checkpoint.greedy(prompt, 32) for prompt in PROMPTS]
    assert [ids(results) for results in generate(engine, PROMPTS, 32, chunk=64)] == expected


@needs_flash_attn
def test_blocks_travel_between_two_pools_bit_for_bit(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "qwen3", "qwen3")
    config = EngineConfig(
        device="cuda",
        dtype=Dtype.BFLOAT16,
        backend="flash",
        block_size=256,
        kv_pool_bytes=32 * MIB,
    )
    source, target = (load_engine(checkpoint.path, config, lambda *_: None) for _ in range(2))
    [expected] = generate(source, [PROMPTS[3]], 16)
    sent = Running(source, "sent", PROMPTS[3], 0)
    prefill(source, sent, GREEDY, 512)
    received = Running(target, "received", PROMPTS[3], 16)
    payload = exported(source.pool, sent.blocks)
    target.pool.import_blocks(received.blocks[: len(sent.blocks)], payload)
    received.results.extend(sent.results)
    decode(target, [received], GREEDY, 16)
    assert received.results == expected


def test_a_write_into_a_poisoned_block_on_the_gpu_shows() -> None:
    pool = KVPool(KVLayout(2, 16, 2, 64, torch.bfloat16), 200, torch.device("cuda"))
    pool.poison(range(200))
    assert pool.count_spoiled(range(1, 200)) == 0
    pool.blocks[[3, 150], 0, 1, 1, 0, 2] = 0.0
    assert pool.count_spoiled(range(1, 200)) == 2
    assert pool.count_spoiled([]) == 0
