"""Tests that a fork, which copies a prompt's last KV block and recomputes its last token, has the
bits of a prompt computed alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.batch import StepRow
from engine.native.library import load_library
from triolet.config import Dtype, EngineConfig
from triolet.sampling import SamplingParams
from triolet.units import MIB

from .checkpoints import write_checkpoint
from .driver import Running, decode, ids, open_engine, prefill

if TYPE_CHECKING:
    from pathlib import Path

    from engine.load import Engine

pytestmark = pytest.mark.slow

LENGTHS = (1, 15, 16, 17, 100)
NUM_TOKENS = 8
SEEDED = [SamplingParams(temperature=0.9, top_p=0.95, seed=n, logprobs=20) for n in range(3)]


def alone(engine: Engine, prompt: list[int], params: SamplingParams) -> Running:
    """Complete a prompt without cached KV."""
    sequence = Running(engine, object(), prompt, NUM_TOKENS)
    prefill(engine, sequence, params, len(prompt))
    decode(engine, [sequence], params, NUM_TOKENS)
    return sequence


def forked(engine: Engine, origin: Running, params: SamplingParams) -> Running:
    """Complete the prompt of a sequence that has already continued."""
    fork = Running(engine, object(), origin.prompt, NUM_TOKENS)
    num_shared = (len(origin.prompt) - 1) // engine.pool.layout.block_size
    fork.blocks[:num_shared] = origin.blocks[:num_shared]
    engine.pool.copy_block(origin.blocks[num_shared], fork.blocks[num_shared])
    start = len(origin.prompt) - 1
    prefill_last(engine, fork, params, start)
    decode(engine, [fork], params, NUM_TOKENS)
    return fork


def prefill_last(engine: Engine, fork: Running, params: SamplingParams, start: int) -> None:
    row = StepRow(fork.prompt[start:], start, fork.blocks, fork.spec(engine, params))
    [result] = engine.runner.step([row])
    assert result is not None
    fork.results.append(result)


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("backend", ["native", "sdpa"])
def test_a_fork_has_the_bits_of_a_prompt_of_its_own(
    tmp_path: Path, backend: str, dtype: Dtype
) -> None:
    if backend == "native" and load_library() is None:
        pytest.skip("the kernels are not built for this machine")
    config = EngineConfig(dtype=dtype, backend=backend, kv_pool_bytes=16 * MIB)
    engine = open_engine(write_checkpoint(tmp_path / "model", "llama").path, config)
    for length in LENGTHS:
        prompt = [3 + (7 * i + length) % 250 for i in range(length)]
        origin = alone(engine, prompt, SEEDED[0])
        for params in SEEDED[1:]:
            own, fork = alone(engine, prompt, params), forked(engine, origin, params)
            assert ids(fork.results) == ids(own.results)
            assert fork.results == own.results, "logprobs to the bit"
