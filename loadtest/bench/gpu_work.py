"""What the GPU's benchmark measures of an engine: steps, prompts, products, KV on its way.

Needs a GPU. Every figure is taken after a warm-up and ends with the device having finished.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from engine.batch import SampleSpec, StepRow
from engine.load import load_engine
from engine.model_config import load_model_config
from engine.runner import MAX_UNDER_WAY
from triolet.config import Dtype, EngineConfig
from triolet.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.batch import Sampled
    from engine.load import Engine

BATCHES: Final = (1, 32, 128, 256)
CONTEXT: Final = 1024
STEPS: Final = 64
WARM_UP_STEPS: Final = 8
PROMPT_TOKENS: Final = 8192
CHUNK: Final = 2048
SHIPPED_TOKENS: Final = 2048
GREEDY: Final = SamplingParams(temperature=0.0)
BLOCK_SIZES: Final = {"triton": 16, "flash": 256, "sdpa": 16}


class Timing(NamedTuple):
    """Seconds of a decode step: launched ahead of the one before it being read, and after."""

    ahead_s: float
    read_each_s: float


def open_engine(model: Path, backend: str, batches: tuple[int, ...]) -> Engine:
    """Load a model with a pool that holds the largest batch."""
    block_size = BLOCK_SIZES[backend]
    config = EngineConfig(
        dtype=Dtype.BFLOAT16,
        backend=backend,
        device="cuda",
        block_size=block_size,
        max_num_seqs=max(batches),
        max_num_batched_tokens=CHUNK,
        max_model_len=PROMPT_TOKENS,
        kv_pool_bytes=_pool_bytes(model, block_size, max(batches)),
    )
    return load_engine(model, config, lambda stage, share: None)


def _pool_bytes(model: Path, block_size: int, rows: int) -> int:
    config = load_model_config(model)
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    held = CONTEXT + STEPS + WARM_UP_STEPS + 2 * block_size
    return per_token * max(rows * held, PROMPT_TOKENS + 2 * block_size)


def time_decode(engine: Engine, batch: int) -> Timing:
    """Time steps of rows that have `CONTEXT` tokens; what their KV holds does not matter."""
    block_size = engine.pool.layout.block_size
    num_blocks = -(-(CONTEXT + STEPS + WARM_UP_STEPS) // block_size)
    tables = [engine.ledger.lease(row, num_blocks) for row in range(batch)]
    try:
        for ahead in (0, MAX_UNDER_WAY - 1):  # kernels are compiled in the first
            _decode(engine, tables, WARM_UP_STEPS, ahead)
        times = []
        for ahead in (MAX_UNDER_WAY - 1, 0):
            began_at = perf_counter()
            _decode(engine, tables, STEPS, ahead)
            times.append((perf_counter() - began_at) / STEPS)
    finally:
        for row in range(batch):
            engine.ledger.release(row)
    return Timing(*times)


def _decode(engine: Engine, tables: list[list[int]], steps: int, ahead: int) -> None:
    under_way: deque[Callable[[], list[Sampled | None]]] = deque()
    for step in range(steps):
        rows = [
            StepRow(
                [1],
                CONTEXT + step,
                table,
                SampleSpec(GREEDY, step),
                is_decode=True,
                follows=index if under_way else None,
            )
            for index, table in enumerate(tables)
        ]
        under_way.append(engine.runner.launch(rows))
        if len(under_way) > ahead:
            under_way.popleft()()
    for read in under_way:
        read()


def time_prefill(engine: Engine) -> float:
    """Return prompt tokens per second of one long prompt, in chunks."""
    table = engine.ledger.lease("prompt", -(-PROMPT_TOKENS // engine.pool.layout.block_size))
    try:
        for _ in range(2):
            began_at = perf_counter()
            for start in range(0, PROMPT_TOKENS, CHUNK):
                engine.runner.step([StepRow([1] * CHUNK, start, table)])
            elapsed_s = perf_counter() - began_at
    finally:
        engine.ledger.release("prompt")
    return PROMPT_TOKENS / elapsed_s


def time_shipping(engine: Engine) -> tuple[float, float]:
    """Return GB/s out of the pool and into it, and check that the bytes are the same."""
    pool = engine.pool
    num_blocks = -(-SHIPPED_TOKENS // pool.layout.block_size)
    table = engine.ledger.lease("shipped", num_blocks)
    chunk = max(1, 2**20 // pool.bytes_per_block)
    ring = memoryview(bytearray(chunk * pool.bytes_per_block))
    pool.pin(ring)
    times = [0.0, 0.0]
    try:
        pool.blocks[table[0]].normal_()
        pool.finish_writes()
        for first in range(0, num_blocks, chunk):
            blocks = table[first : first + chunk]
            began_at = perf_counter()
            payload = pool.export_blocks(blocks, ring[: len(blocks) * pool.bytes_per_block])
            times[0] += perf_counter() - began_at
            began_at = perf_counter()
            pool.import_blocks(blocks, payload)
            pool.await_imports()
            pool.finish_writes()
            times[1] += perf_counter() - began_at
            assert bytes(pool.export_blocks(blocks)) == bytes(payload), "bytes changed on the way"
    finally:
        pool.unpin(ring)
        engine.ledger.release("shipped")
    num_bytes = num_blocks * pool.bytes_per_block
    return num_bytes / times[0] / 1e9, num_bytes / times[1] / 1e9


def sizes_that_agree(outputs: int, inputs: int, sizes: tuple[int, ...]) -> list[int]:
    """Return the numbers of rows for which a product has the bits of the largest, at every row."""
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs, device="cuda").bfloat16() * 0.02
    rows = torch.randn(sizes[-1], inputs, device="cuda").bfloat16()
    expected = torch.nn.functional.linear(rows, weight)
    agreeing = []
    for size in sizes:
        actual = torch.nn.functional.linear(rows[:size], weight)
        turned = torch.nn.functional.linear(rows[:size].flip(0), weight).flip(0)
        if torch.equal(actual, expected[:size]) and torch.equal(actual, turned):
            agreeing.append(size)
    return agreeing


def copy_speed() -> float:
    """Return GB/s of the device's memory, read and written."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / _best_s(lambda: target.copy_(source)) / 1e9


def product_speed() -> float:
    """Return TFLOP/s of a large product in bf16."""
    left, right = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / _best_s(lambda: left @ right) / 1e12


def _best_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began_at = perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(perf_counter() - began_at)
    return min(times)
