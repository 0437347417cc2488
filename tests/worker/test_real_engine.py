"""Tests of prefill and decode with a real model over real sockets: the same tokens as one engine
alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.engine.checkpoints import write_checkpoint
from tests.engine.driver import generate, ids, open_engine
from transport.frames import EndReason
from triolet.config import EngineConfig, MemorySharing, WireConfig
from triolet.ids import Role
from triolet.sampling import SamplingParams
from triolet.units import MIB

from .real import SMALL_LINK, open_engines, open_workers

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
PROMPT_LENGTHS = (1, 15, 16, 17, 100, 300)


def prompts() -> list[list[int]]:
    return [[3 + (7 * i + length) % 250 for i in range(length)] for length in PROMPT_LENGTHS]


@pytest.mark.parametrize("sharing", [MemorySharing.OFF, MemorySharing.ON])
async def test_tokens_through_two_workers_are_those_of_one_engine(
    tmp_path: Path, sharing: MemorySharing
) -> None:
    model = write_checkpoint(tmp_path / "model", "llama").path
    expected = [ids(r) for r in generate(open_engine(model), prompts(), NUM_TOKENS)]
    link = replace(SMALL_LINK, wire=WireConfig(sharing))
    engine = EngineConfig(kv_pool_bytes=4 * MIB, max_num_batched_tokens=64)
    engines = open_engines(model, engine)
    async with open_workers(engines, model, engine, tmp_path, link) as client:
        answers = [await client.start(prompt, GREEDY) for prompt in prompts()]
        for answer, tokens in zip(answers, expected, strict=True):
            await client.finish(answer)
            assert answer.token_ids == tokens
            assert answer.ended[Role.DECODE][0].reason is EndReason.LENGTH
            assert answer.ended[Role.PREFILL][0].reason is EndReason.HANDED_OVER
