"""Tests that a decode worker gives the same tokens with a draft model as without one, over real
sockets."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import trio

import decode.worker
import prefill.worker
from engine.device_thread import DeviceThread
from tests.engine.driver import generate, ids, open_engine
from transport.frames import EndReason
from transport.zmq_network import ZmqNetwork
from triolet.config import Dtype, EngineConfig, LinkConfig, SpeculationConfig, WorkerConfig
from triolet.errors import ConfigError
from triolet.ids import Role
from triolet.sampling import SamplingParams
from triolet.units import MIB
from worker.local_engine import LocalEngine

from .client import Client
from .patience import unhurried

LINK = unhurried(LinkConfig())
DEMO = Path(__file__).parents[2] / "triolet" / "demo"
NUM_TOKENS = 24
SAMPLINGS = (
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True),
)
PROMPTS = ([1, 40, 300, 77, 500], [1, *range(200, 330)])


def worker_config(sockets: Path, role: Role, draft: Path) -> WorkerConfig:
    return WorkerConfig(
        name=role,
        model_dir=str(DEMO),
        control_address=f"ipc://{sockets}/{role}",
        kv_address=f"ipc://{sockets}/kv" if role is Role.DECODE else None,
        engine=EngineConfig(dtype=Dtype.BFLOAT16, kv_pool_bytes=4 * MIB),
        speculation=SpeculationConfig(source=str(draft), draft_pool_bytes=4 * MIB),
        link=LINK,
    )


@pytest.mark.slow
async def test_a_model_that_drafts_for_itself_is_nearly_always_right(tmp_path: Path) -> None:
    configs = {role: worker_config(tmp_path, role, DEMO) for role in (Role.PREFILL, Role.DECODE)}
    engines = {role: LocalEngine(open_engine(DEMO, c.engine)) for role, c in configs.items()}
    reference = open_engine(DEMO, configs[Role.DECODE].engine)
    expected = [
        [ids(generate(reference, [prompt], NUM_TOKENS, sampling)[0]) for prompt in PROMPTS]
        for sampling in SAMPLINGS
    ]
    with closing(ZmqNetwork(LINK)) as control, closing(ZmqNetwork(LINK)) as kv:
        async with DeviceThread(1, 1, 10.0) as device, trio.open_nursery() as nursery:
            serving = {
                Role.PREFILL: prefill.worker.serve,
                Role.DECODE: decode.worker._load_and_serve,
            }
            loops = {
                role: await nursery.start(serve, configs[role], engines[role], device, control, kv)
                for role, serve in serving.items()
            }
            client = Client(control, {role: c.control_address for role, c in configs.items()})
            await nursery.start(client.run)
            for sampling, right in zip(SAMPLINGS, expected, strict=True):
                answers = [await client.start(prompt, sampling) for prompt in PROMPTS]
                for answer, token_ids in zip(answers, right, strict=True):
                    await client.finish(answer)
                    assert answer.ended[Role.DECODE][0].reason is EndReason.LENGTH
                    assert answer.token_ids == token_ids
            core = loops[Role.DECODE]._core
            assert core.counters.speculative_accepted > NUM_TOKENS
            assert core.account(trio.current_time()).draft_pool.leased_blocks == 0
            nursery.cancel_scope.cancel()


@pytest.mark.slow
def test_a_draft_model_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    config = worker_config(tmp_path, Role.DECODE, tmp_path)
    with pytest.raises(ConfigError, match=r"the draft model cannot be used: .*safetensors"):
        decode.worker.load_drafts(config, tmp_path, 2048)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    with pytest.raises(ConfigError, match="whose vocabulary differs"):
        decode.worker.load_drafts(config, tmp_path, 2048)
    small = replace(config, speculation=replace(config.speculation, draft_pool_bytes=1))
    with pytest.raises(ConfigError, match="the draft model cannot be used: kv_pool_bytes is 1"):
        decode.worker.load_drafts(small, DEMO, 2048)
