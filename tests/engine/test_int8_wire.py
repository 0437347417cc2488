"""KV that is rounded on its way: half the bytes, and logits within the stated bound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.batch import FlatStep, StepRow, flatten
from engine.int8_wire import Int8Wire
from engine.kv_pool import KVLayout, KVPool
from triolet.config import Dtype, EngineConfig, KvWire
from triolet.errors import RemoteProtocolError
from triolet.units import MIB

from .driver import GREEDY, Running, open_engine, prefill

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from engine.load import Engine

    from .checkpoints import Checkpoint

DEMO = Path(__file__).parents[2] / "triolet" / "demo"
LOGITS_ERROR = 0.03
"""What KvWire states: root mean square, as a share of the logits' spread."""
NUM_FORCED = 32
TEXT = (
    "Tom had a small red boat. He took it to the lake with his sister Mia every day after school. "
    "One day the wind was strong and the boat went far away from them. Mia saw a big dog on the "
    "other side. The dog jumped into the water, swam to the boat and brought it back to Tom. Tom "
    "was very happy. He gave the dog a piece of bread and they all played together in the sun."
)


def random_pool(dtype: torch.dtype) -> KVPool:
    pool = KVPool(KVLayout(3, 4, 2, 16, dtype), 6, torch.device("cpu"))
    pool.blocks.copy_(torch.randn(pool.blocks.shape) * torch.rand(6, 3, 2, 4, 2, 1) * 10)
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_come_back_within_half_a_step_of_their_head(dtype: torch.dtype) -> None:
    source, target = random_pool(dtype), random_pool(dtype)
    payload = Int8Wire(source).export_blocks([5, 1])
    assert len(payload) == 2 * Int8Wire(source).bytes_per_block
    assert len(payload) < 0.7 * 2 * source.bytes_per_block
    Int8Wire(target).import_blocks([2, 4], payload)
    exact, ours = source.blocks[[5, 1]].float(), target.blocks[[2, 4]].float()
    largest = exact.abs().amax(dim=-1, keepdim=True)
    rounding = 0 if dtype is torch.float32 else 2**-8
    assert bool(((ours - exact).abs() <= largest * (0.5 / 127 + rounding + 1e-6)).all())
    assert not torch.equal(ours, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_zeros_and_what_is_no_number_spoils_its_head_only(dtype: torch.dtype) -> None:
    source, target = random_pool(dtype), random_pool(dtype)
    source.blocks[1] = 0
    source.blocks[2, 0, 0, 0, 0, 3] = float("nan")
    source.blocks[2, 1, 1, 3, 1, 0] = float("inf")
    Int8Wire(target).import_blocks([1, 2], Int8Wire(source).export_blocks([1, 2]))
    assert bool((target.blocks[1] == 0).all())
    finite = target.blocks[2].isfinite().all(dim=-1)
    assert int((~finite).sum()) == 2


def test_a_payload_of_another_size_is_refused() -> None:
    pool = random_pool(torch.float32)
    with pytest.raises(RemoteProtocolError, match="for 3 layers of blocks of 320"):
        Int8Wire(pool).import_blocks([1], bytes(pool.bytes_per_block))


def test_workers_that_round_and_those_that_do_not_have_other_fingerprints(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    path = checkpoint("llama").path
    exact, rounded = (
        open_engine(path, EngineConfig(kv_wire=wire, kv_pool_bytes=4 * MIB)) for wire in KvWire
    )
    assert exact.fingerprint != rounded.fingerprint
    assert exact.wire is exact.pool
    assert isinstance(rounded.wire, Int8Wire)


def forced_logits(engine: Engine, sequence: Running, token_ids: list[int]) -> Tensor:
    """Feed tokens behind a prompt that is in the pool; return the logits after each."""
    steps: list[FlatStep] = []
    for index, token in enumerate(token_ids):
        row = StepRow(
            [token],
            len(sequence.prompt) + index,
            sequence.blocks,
            sequence.spec(engine, GREEDY),
            is_decode=True,
        )
        steps.append(flatten([row], engine.pool.layout.block_size))
    with torch.inference_mode():
        logits = [engine.runner.model.compute(step) for step in steps]
    return torch.stack([row[0] for row in logits if row is not None]).clone()


def error_of_shipping(path: Path, token_ids: list[int], dtype: Dtype) -> float:
    """Return the logits' error on KV that was rounded, as a share of their spread."""
    config = EngineConfig(dtype=dtype, kv_pool_bytes=16 * MIB)
    engine = open_engine(path, config)
    prompt, forced = token_ids[:-NUM_FORCED], token_ids[-NUM_FORCED:]
    exact = Running(engine, "exact", prompt, NUM_FORCED)
    prefill(engine, exact, GREEDY, 512)
    rounded = Running(engine, "rounded", prompt, NUM_FORCED)
    num_blocks = -(-len(prompt) // engine.pool.layout.block_size)
    wire = Int8Wire(engine.pool)
    wire.import_blocks(rounded.blocks[:num_blocks], wire.export_blocks(exact.blocks[:num_blocks]))
    expected = forced_logits(engine, exact, forced)
    ours = forced_logits(engine, rounded, forced)
    return float((ours - expected).square().mean().sqrt() / expected.std())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(Dtype))
def test_a_trained_models_logits_err_within_the_stated_bound(dtype: Dtype) -> None:
    token_ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(TEXT).ids
    assert 0 < error_of_shipping(DEMO, token_ids, dtype) < LOGITS_ERROR


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "llama3-tied", "qwen3"])
def test_random_models_logits_err_within_the_stated_bound(
    checkpoint: Callable[[str], Checkpoint], family: str
) -> None:
    token_ids = np.random.default_rng(7).integers(3, 250, size=200).tolist()
    path = checkpoint(family).path
    assert 0 < error_of_shipping(path, token_ids, Dtype.BFLOAT16) < LOGITS_ERROR
