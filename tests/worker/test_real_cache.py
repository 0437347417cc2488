"""Chats over a real model and real sockets: a hit changes no token, whatever computes it."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import trio

import decode.worker
import prefill.worker
from engine.device_thread import DeviceThread
from engine.native.library import load_library
from tests.engine.checkpoints import write_checkpoint
from tests.engine.driver import generate, ids, open_engine
from transport.zmq_network import ZmqNetwork
from triolet.config import Dtype, EngineConfig, LinkConfig, WorkerConfig
from triolet.ids import Role
from triolet.sampling import SamplingParams
from triolet.units import KIB, MIB
from worker.local_engine import LocalEngine

from .client import Client
from .patience import unhurried

if TYPE_CHECKING:
    from pathlib import Path

    from engine.load import Engine

pytestmark = pytest.mark.slow

NUM_TOKENS = 20
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
LINK = unhurried(
    LinkConfig(kv_chunk_bytes=32 * KIB, kv_window_bytes=64 * KIB, kv_ring_bytes=128 * KIB)
)


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
    sockets = tmp_path / "s"
    sockets.mkdir(mode=0o700)
    configs = {
        role: WorkerConfig(
            name=role,
            model_dir=str(model),
            control_address=f"ipc://{sockets}/{role}",
            kv_address=f"ipc://{sockets}/kv" if role is Role.DECODE else None,
            engine=engine,
            link=LINK,
        )
        for role in (Role.PREFILL, Role.DECODE)
    }
    engines = {role: LocalEngine(open_engine(model, engine)) for role in configs}
    with closing(ZmqNetwork(LINK)) as control, closing(ZmqNetwork(LINK)) as kv:
        async with DeviceThread(1, 1, 10.0) as device, trio.open_nursery() as nursery:
            for role, serve in (
                (Role.PREFILL, prefill.worker.serve),
                (Role.DECODE, decode.worker.serve),
            ):
                await nursery.start(serve, configs[role], engines[role], device, control, kv)
            client = Client(control, {role: c.control_address for role, c in configs.items()})
            await nursery.start(client.run)
            for prompt, reply in turns:
                answer = await client.start(prompt, GREEDY)
                await client.finish(answer)
                assert answer.token_ids == reply
            nursery.cancel_scope.cancel()
    for local in engines.values():
        local.prefix_cache.check_invariants()
        counts = local.prefix_cache.counts
        assert counts.hit_tokens > 0
        assert counts.restored_blocks > 0
        assert local.ledger.leased_blocks == 0
