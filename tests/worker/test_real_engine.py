"""Prefill and decode with a real model over real sockets: the same tokens as in one process."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import trio

import decode.worker
import prefill.worker
from engine.device_thread import DeviceThread
from tests.engine.checkpoints import write_checkpoint
from tests.engine.driver import generate, ids, open_engine
from transport.frames import EndReason
from transport.zmq_network import ZmqNetwork
from triolet.config import EngineConfig, LinkConfig, MemorySharing, WireConfig, WorkerConfig
from triolet.ids import Role
from triolet.sampling import SamplingParams
from triolet.units import KIB, MIB
from worker.local_engine import LocalEngine

from .client import Client
from .patience import unhurried

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
PROMPT_LENGTHS = (1, 15, 16, 17, 100, 300)


def prompts() -> list[list[int]]:
    return [[3 + (7 * i + length) % 250 for i in range(length)] for length in PROMPT_LENGTHS]


def both(
    model: Path, sockets: Path, engine: EngineConfig, link: LinkConfig
) -> dict[Role, WorkerConfig]:
    return {
        role: WorkerConfig(
            name=role,
            model_dir=str(model),
            control_address=f"ipc://{sockets}/{role}",
            kv_address=f"ipc://{sockets}/kv" if role is Role.DECODE else None,
            engine=engine,
            link=link,
        )
        for role in (Role.PREFILL, Role.DECODE)
    }


@pytest.mark.parametrize("sharing", [MemorySharing.OFF, MemorySharing.ON])
async def test_tokens_through_two_workers_are_those_of_one_engine(
    tmp_path: Path, sharing: MemorySharing
) -> None:
    model = write_checkpoint(tmp_path / "model", "llama").path
    expected = [ids(r) for r in generate(open_engine(model), prompts(), NUM_TOKENS)]
    sockets = tmp_path / "s"
    sockets.mkdir(mode=0o700)
    # Two blocks per chunk, so that prompts travel in several and out of step with their compute.
    link = unhurried(
        LinkConfig(
            kv_chunk_bytes=32 * KIB,
            kv_window_bytes=64 * KIB,
            kv_ring_bytes=128 * KIB,
            wire=WireConfig(sharing),
        )
    )
    engine = EngineConfig(kv_pool_bytes=4 * MIB, max_num_batched_tokens=64)
    configs = both(model, sockets, engine, link)
    engines = {role: LocalEngine(open_engine(model, engine)) for role in configs}
    with closing(ZmqNetwork(link)) as control, closing(ZmqNetwork(link)) as kv:
        async with DeviceThread(1, 1, 10.0) as device, trio.open_nursery() as nursery:
            for role, serve in (
                (Role.PREFILL, prefill.worker.serve),
                (Role.DECODE, decode.worker.serve),
            ):
                await nursery.start(serve, configs[role], engines[role], device, control, kv)
            client = Client(control, {role: c.control_address for role, c in configs.items()})
            await nursery.start(client.run)
            answers = [await client.start(prompt, GREEDY) for prompt in prompts()]
            for answer, tokens in zip(answers, expected, strict=True):
                await client.finish(answer)
                assert answer.token_ids == tokens
                assert answer.ended[Role.DECODE][0].reason is EndReason.LENGTH
                assert answer.ended[Role.PREFILL][0].reason is EndReason.HANDED_OVER
            nursery.cancel_scope.cancel()
    for local in engines.values():
        local.ledger.check_invariants()
        assert local.ledger.leased_blocks == 0
