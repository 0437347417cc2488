"""Tests of the engine on a real NVIDIA GPU: its kernels are compared with explicit attention and
with the CPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from engine.attention.registry import create_attention
from engine.batch import StepRow, flatten
from engine.kv_pool import KVLayout, KVPool
from engine.load import load_engine
from tests.engine.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.engine.driver import (
    GREEDY,
    Running,
    decode,
    exported,
    generate,
    ids,
    launched_ahead,
    prefill,
)
from tests.engine.kernels import attention_of_one
from triolet.config import Dtype, EngineConfig, GpuConfig
from triolet.sampling import SamplingParams
from triolet.units import MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]
needs_flash_attn = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed"
)
ROOT = Path(__file__).parents[2]
PROMPTS = [[(7 * i + n) % VOCAB_SIZE for i in range(n)] for n in (1, 16, 17, 300)]


BACKENDS = ["sdpa", "triton", pytest.param("flash", marks=needs_flash_attn)]
FUSED = BACKENDS[1:]


@pytest.mark.parametrize("backend", BACKENDS)
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
        StepRow([0], 40, [6]),
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


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize("family", ["qwen3", "llama-biases", "qwen2-tied"])
def test_fp32_on_the_gpu_gives_the_tokens_of_transformers(
    tmp_path: Path, backend: str, family: str
) -> None:
    checkpoint = write_checkpoint(tmp_path / family, family)
    config = EngineConfig(
        device="cuda", dtype=Dtype.FLOAT32, backend=backend, kv_pool_bytes=16 * MIB
    )
    engine = load_engine(checkpoint.path, config, lambda *_: None)
    expected = [checkpoint.greedy(prompt, 32) for prompt in PROMPTS]
    assert [ids(results) for results in generate(engine, PROMPTS, 32, chunk=64)] == expected


def fused_config(backend: str, gpu: GpuConfig | None = None) -> EngineConfig:
    return EngineConfig(
        device="cuda",
        dtype=Dtype.BFLOAT16,
        backend=backend,
        block_size=256 if backend == "flash" else 16,
        kv_pool_bytes=32 * MIB,
        max_num_seqs=16,
        gpu=gpu or GpuConfig(),
    )


@pytest.mark.parametrize("backend", FUSED)
def test_a_replayed_step_has_the_bits_of_a_launched_one(tmp_path: Path, backend: str) -> None:
    path = write_checkpoint(tmp_path / "qwen3", "qwen3").path
    replayed, launched = (
        generate(
            load_engine(path, fused_config(backend, GpuConfig(cuda_graphs=on)), lambda *_: None),
            PROMPTS,
            24,
        )
        for on in (True, False)
    )
    assert replayed == launched


@pytest.mark.parametrize("backend", FUSED)
def test_steps_launched_ahead_give_the_same_tokens(tmp_path: Path, backend: str) -> None:
    path = write_checkpoint(tmp_path / "qwen3", "qwen3").path
    engine = load_engine(path, fused_config(backend), lambda *_: None)
    params = SamplingParams(temperature=0.8, seed=11)
    expected = [ids(results) for results in generate(engine, PROMPTS, 48, params)]
    sequences = [Running(engine, n, prompt, 48) for n, prompt in enumerate(PROMPTS)]
    for sequence in sequences:
        prefill(engine, sequence, params, 512)
    launched_ahead(engine, sequences, params, 48)
    assert [ids(sequence.results) for sequence in sequences] == expected


@pytest.mark.parametrize("backend", FUSED)
def test_a_row_of_a_fixed_batch_has_the_same_bits_whoever_else_is_there(
    tmp_path: Path, backend: str
) -> None:
    path = write_checkpoint(tmp_path / "qwen3", "qwen3").path
    config = fused_config(backend, GpuConfig(fixed_batch=True))
    engine = load_engine(path, config, lambda *_: None)
    [alone] = generate(engine, PROMPTS[2:3], 24)
    crowd = [[(5 * i + n) % VOCAB_SIZE for i in range(9 + n)] for n in range(12)]
    sequences = [Running(engine, n, p, 24) for n, p in enumerate([*crowd, PROMPTS[2]])]
    for sequence in sequences:
        prefill(engine, sequence, GREEDY, 512)
    decode(engine, sequences, GREEDY, 24)
    assert sequences[-1].results[1:] == alone[1:]


def test_rows_without_numbers_still_get_a_token() -> None:
    choose = import_module("engine.gpu.sampler_kernels").choose
    gpu = torch.device("cuda")
    logits = torch.full((2, 5000), float("nan"), device=gpu)
    temperatures = torch.tensor([0.0, 1.0], dtype=torch.float64, device=gpu)
    zeros = torch.zeros(2, dtype=torch.int64, device=gpu)
    chosen = choose(logits, temperatures, zeros.double(), zeros, zeros).tolist()
    assert all(0 <= token < 5000 for token in chosen)


@pytest.mark.parametrize("backend", FUSED)
def test_blocks_travel_between_two_pools_bit_for_bit(tmp_path: Path, backend: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "qwen3", "qwen3")
    config = fused_config(backend)
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


@pytest.mark.parametrize("graphs", [True, False])
def test_no_kernel_is_compiled_while_requests_wait(tmp_path: Path, graphs: bool) -> None:
    knobs = import_module("triton").knobs
    path = write_checkpoint(tmp_path / "qwen3", "qwen3").path
    config = fused_config("triton", GpuConfig(cuda_graphs=graphs))
    engine = load_engine(path, config, lambda *_: None)
    late = []
    knobs.runtime.jit_cache_hook = lambda **told: late.append(told["repr"])
    try:
        generate(engine, PROMPTS, 24, chunk=64)
        sequence = Running(engine, "mixed", PROMPTS[3], 4)
        prefill(engine, sequence, GREEDY, 64)
        row = StepRow([1], 300, sequence.blocks, is_decode=True)
        for count in (1, 9, 64):
            blocks = engine.ledger.lease(count, -(-count // 16))
            engine.runner.step([row, StepRow([1] * count, 0, blocks)])
    finally:
        knobs.runtime.jit_cache_hook = None
    assert late == []


@pytest.mark.parametrize("is_decode", [False, True])
@pytest.mark.parametrize("backend", FUSED)
def test_a_row_has_the_same_bits_beside_a_longer_one(backend: str, is_decode: bool) -> None:
    torch.manual_seed(7)
    gpu = torch.device("cuda")
    pool = KVPool(KVLayout(2, 256, 2, 64, torch.bfloat16), 40, gpu)
    pool.blocks.normal_()
    attention = create_attention(backend, pool, 8, 8192)
    row = StepRow([0], 700, [3, 9, 1], is_decode=is_decode)
    longer = StepRow([0], 7000, list(range(10, 38)), is_decode=is_decode)
    outputs = []
    for rows in ([row], [row, longer]):
        step = flatten(rows, 256)
        torch.manual_seed(8)
        inputs = [torch.randn(1, n, 64, dtype=torch.bfloat16, device=gpu) for n in (8, 2, 2)]
        attention.plan(step)
        stacked = [tensor.expand(len(step.token_ids), -1, -1).contiguous() for tensor in inputs]
        outputs.append(attention.attend(1, *stacked)[0])
    assert torch.equal(*outputs)


POISON = """
import torch
from engine.kv_pool import KVLayout, KVPool
pool = KVPool(KVLayout(1, 16, 1, 8, torch.float32), 4, torch.device("cuda"))
pool.check_device()
torch._assert_async(torch.zeros(1, device="cuda"))
try:
    pool.check_device()
except RuntimeError:
    print("lost")
"""


def test_a_poisoned_context_is_noticed() -> None:
    command = [sys.executable, "-c", POISON]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.stdout == "lost\n", finished.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two GPUs here")
def test_the_second_gpu_gives_the_tokens_of_the_first(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "qwen3", "qwen3").path
    first, second = (
        generate(
            load_engine(path, replace(fused_config("triton"), device=device), lambda *_: None),
            PROMPTS,
            16,
        )
        for device in ("cuda:0", "cuda:1")
    )
    assert first == second


def test_a_write_into_a_poisoned_block_on_the_gpu_shows() -> None:
    pool = KVPool(KVLayout(2, 16, 2, 64, torch.bfloat16), 200, torch.device("cuda"))
    pool.poison(range(200))
    assert pool.count_spoiled(range(1, 200)) == 0
    pool.blocks[[3, 150], 0, 1, 1, 0, 2] = 0.0
    assert pool.count_spoiled(range(1, 200)) == 2
    assert pool.count_spoiled([]) == 0
