"""Tests of the fused GPU decoder: it generates the same tokens as transformers, also when steps are
launched ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from engine.batch import SampleSpec, StepRow
from tests.engine.checkpoints import VOCAB_SIZE, Checkpoint
from tests.engine.driver import (
    Running,
    decode,
    generate,
    ids,
    launched_ahead,
    open_engine,
    prefill,
)
from triolet.config import EngineConfig, GpuConfig
from triolet.errors import CapacityError
from triolet.sampling import SamplingParams

from .fused import fused_engine

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPTS = [[(7 * i + n) % VOCAB_SIZE for i in range(n)] for n in (1, 3, 6)]
"""Less than a block, a block once a token follows, and more than a block."""
PLAIN = SamplingParams(temperature=0.0)
CONFIG = EngineConfig(backend="triton", max_num_seqs=8, block_size=4)


@pytest.mark.slow
def test_fused_steps_give_the_tokens_of_transformers(
    device: torch.device, checkpoint: Callable[[str], Checkpoint]
) -> None:
    written = checkpoint("qwen3")
    engine = fused_engine(written.path, device, CONFIG)
    results = generate(engine, PROMPTS, 4, PLAIN, chunk=4)
    assert [ids(one) for one in results] == [written.greedy(prompt, 4) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_steps_launched_ahead_give_the_same_tokens(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Checkpoint],
    backend: str,
    whole: bool,
) -> None:
    path = checkpoint("qwen3").path
    params = SamplingParams(temperature=0.8, seed=11)
    count = 6 if whole else 4
    if backend == "triton":
        engine = fused_engine(path, request.getfixturevalue("device"), CONFIG)
    else:
        engine = open_engine(path)
    expected = [ids(one) for one in generate(open_engine(path), PROMPTS, count, params)]
    sequences = [Running(engine, n, prompt, count) for n, prompt in enumerate(PROMPTS)]
    for sequence in sequences:
        prefill(engine, sequence, params, 512)
    # They end at different steps, so that rows leave while others continue.
    launched_ahead(engine, sequences[:2], params, count // 2)
    launched_ahead(engine, sequences, params, count)
    assert [ids(one.results) for one in sequences] == expected


@pytest.mark.slow
def test_a_step_that_finds_no_memory_leaves_the_next_one_exact(
    device: torch.device, checkpoint: Callable[[str], Checkpoint]
) -> None:
    written = checkpoint("qwen3")
    engine = fused_engine(written.path, device, CONFIG)
    sequence = Running(engine, "again", PROMPTS[1], 3)
    prefill(engine, sequence, PLAIN, 512)
    decoder = engine.runner._decoder
    assert decoder is not None
    send = decoder._patches.send

    def fail(array: object) -> torch.Tensor:
        decoder._patches.send = send  # type: ignore[method-assign]
        raise torch.OutOfMemoryError("no memory for the copy")

    decoder._patches.send = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(CapacityError):
        decode(engine, [sequence], PLAIN, 3)
    decode(engine, [sequence], PLAIN, 3)
    assert ids(sequence.results) == written.greedy(PROMPTS[1], 3)


@pytest.mark.slow
def test_rows_that_ask_for_more_are_sampled_by_the_host(
    device: torch.device, checkpoint: Callable[[str], Checkpoint]
) -> None:
    path = checkpoint("qwen3").path
    demanding = [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=0.9, seed=3, top_p=0.8),
        SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, min_tokens=9, stop_token_ids=(5,)),
    ]
    explicit = open_engine(path)
    expected = [generate(explicit, [PROMPTS[1]], 2, params)[0] for params in demanding]
    engine = fused_engine(path, device, CONFIG)
    sequences = [Running(engine, n, PROMPTS[1], 2) for n in range(len(demanding))]
    for sequence, params in zip(sequences, demanding, strict=True):
        prefill(engine, sequence, params, 512)
    # All in one step: each row uses its own sampling parameters.
    rows = [
        StepRow(
            sequence.output_ids,
            len(PROMPTS[1]),
            sequence.blocks,
            sequence.spec(engine, params),
            is_decode=True,
        )
        for sequence, params in zip(sequences, demanding, strict=True)
    ]
    for sequence, result in zip(sequences, engine.runner.step(rows), strict=True):
        assert result is not None
        sequence.results.append(result)
    for sequence, others in zip(sequences, expected, strict=True):
        assert ids(sequence.results) == ids(others)
        for one, other in zip(sequence.results, others, strict=True):
            assert other.logprob == pytest.approx(one.logprob, abs=1e-4)


@pytest.mark.slow
@pytest.mark.proof
def test_a_row_has_the_same_bits_whoever_else_is_in_a_fixed_batch(
    device: torch.device, checkpoint: Callable[[str], Checkpoint], whole: bool
) -> None:
    path = checkpoint("qwen3").path
    config = replace(CONFIG, max_num_seqs=4, gpu=GpuConfig(fixed_batch=True))
    params = SamplingParams(temperature=0.0, logprobs=0)
    count = 3 if whole else 2
    engine = fused_engine(path, device, config)
    [alone] = generate(engine, PROMPTS[1:2], count, params)
    together = [Running(engine, n, prompt, count) for n, prompt in enumerate(PROMPTS)]
    for sequence in together:
        prefill(engine, sequence, params, 512)
    decode(engine, together, params, count)
    assert together[1].results[1:] == alone[1:]


@pytest.mark.slow
def test_chunks_and_guesses_change_no_bit_of_a_row_in_a_fixed_batch(
    device: torch.device, checkpoint: Callable[[str], Checkpoint]
) -> None:
    config = replace(CONFIG, max_num_seqs=2, gpu=GpuConfig(fixed_batch=True))
    params = SamplingParams(temperature=0.0, logprobs=0)
    engine = fused_engine(checkpoint("qwen3").path, device, config)
    [alone] = generate(engine, PROMPTS[1:2], 3, params)
    beside = Running(engine, "beside", PROMPTS[1], 3)
    prefill(engine, beside, params, 512)
    chunk = StepRow(PROMPTS[2], 0, engine.ledger.lease("chunk", 2))
    decoder = engine.runner._decoder
    assert decoder is not None
    sizes = []

    def compute(size: int) -> None:
        sizes.append(size)
        decoder.compute(size)

    decoder.replay_with(compute)
    # A speculated token with the token that it follows, and a chunk: three rows and more.
    rows = [
        StepRow(
            [one.token_id],
            len(PROMPTS[1]) + n,
            beside.blocks,
            SampleSpec(params, n + 1),
            is_decode=True,
        )
        for n, one in enumerate(alone[:2])
    ]
    [_, first, second] = engine.runner.step([chunk, *rows])
    assert [first, second] == alone[1:]
    assert sizes == [2]
