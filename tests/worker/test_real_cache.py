"""Tests of cache hits in chats over a real model and real sockets: they change no token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.native.library import load_library
from tests.engine.checkpoints import write_checkpoint
from tests.engine.driver import generate, ids, open_engine
from triolet.config import Dtype, EngineConfig
from triolet.sampling import SamplingParams
from triolet.units import MIB

from .real import open_engines, open_workers

if TYPE_CHECKING:
    from pathlib import Path

    from engine.load import Engine

pytestmark = pytest.mark.slow

NUM_TOKENS = 20
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


def chats(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Return prompts and replies of three chats with three turns each, in the order of asking."""
    prompts = [[3 + (7 * i + chat) % 250 for i in range(40)] for chat in range(3)]
    turns = []
    for turn in range(3):
        for chat, prompt in enumerate(prompts):
            [results] = generate(engine, [prompt], NUM_TOKENS)
            turns.append((prompt, ids(results)))
            prompts[chat] = [*prompt, *ids(results), 5 + chat, 6 + turn]
    return turns


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("backend", ["native", "sdpa"])
async def test_a_chat_of_three_turns_goes_on_as_if_nothing_were_cached(
    tmp_path: Path, backend: str, dtype: Dtype
) -> None:
    if backend == "native" and load_library() is None:
        pytest.skip("the kernels are not built for this machine")
    model = write_checkpoint(tmp_path / "model", "llama").path
    alone = open_engine(model, EngineConfig(dtype=dtype, backend=backend, prefix_cache=False))
    turns = chats(alone)
    # The pool holds a chat and a half: the others are pushed out to host memory and come back.
    engine = EngineConfig(
        dtype=dtype,
        backend=backend,
        kv_pool_bytes=12 * alone.pool.bytes_per_block,
        host_cache_bytes=4 * MIB,
        max_num_batched_tokens=64,
    )
    engines = open_engines(model, engine)
    async with open_workers(engines, model, engine, tmp_path) as client:
        for prompt, reply in turns:
            answer = await client.start(prompt, GREEDY)
            await client.finish(answer)
            assert answer.token_ids == reply
    for local in engines.values():
        local.prefix_cache.check_invariants()
        counts = local.prefix_cache.counts
        assert counts.hit_tokens > 0
        assert counts.restored_blocks > 0
