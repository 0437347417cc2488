"""Tests of verifying guessed tokens in the engine: computed together in one step, they have the
same bits as one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine.batch import FollowedBy, SampleSpec, StepRow, flatten
from engine.native.library import load_library
from engine.native.model import plan_tasks
from triolet.config import Dtype, EngineConfig
from triolet.sampling import SamplingParams
from triolet.units import MIB

from .checkpoints import VOCAB_SIZE, Checkpoint
from .driver import GREEDY, Running, generate, ids, open_engine, prefill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from engine.batch import Sampled
    from engine.load import Engine

RANDOM = np.random.default_rng(17)
PROMPTS = [RANDOM.integers(3, VOCAB_SIZE, size=n).tolist() for n in (1, 15, 62, 100)]
NUM_TOKENS = 12
EVERYTHING = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, min_p=0.01, seed=11, logprobs=20),
    "top-k": SamplingParams(temperature=1.2, top_k=30, seed=12, logprobs=0),
    "penalties": SamplingParams(
        temperature=0.8,
        presence_penalty=0.6,
        frequency_penalty=0.9,
        repetition_penalty=1.3,
        seed=13,
        logprobs=3,
    ),
    "greedy penalties": SamplingParams(temperature=0.0, repetition_penalty=1.5, logprobs=5),
    "bias": SamplingParams(temperature=0.0, logit_bias=((9, 4.0), (77, -9.0)), logprobs=2),
    "min tokens": SamplingParams(
        temperature=1.0, min_tokens=6, stop_token_ids=tuple(range(3, 60)), seed=14, logprobs=1
    ),
}


def rows_of(
    engine: Engine, sequence: Running, params: SamplingParams, guesses: Sequence[int]
) -> list[StepRow]:
    """Return the row of a sequence's last token, and one for each guess."""
    start = len(sequence.prompt) + len(sequence.results) - 1
    known = sequence.output_ids
    return [
        StepRow(
            [token_id],
            start + i,
            sequence.blocks,
            SampleSpec(
                params,
                len(known) + i,
                sequence.prompt,
                FollowedBy(known, guesses[:i]) if i else known,
                engine.eos_token_ids,
            ),
            is_decode=True,
        )
        for i, token_id in enumerate([known[-1], *guesses])
    ]


def guessed(
    engine: Engine,
    expected: Sequence[Sequence[Sampled]],
    params: SamplingParams,
    counts: Iterator[int],
) -> tuple[list[list[Sampled]], int]:
    """Decode all prompts together, with some wrong guesses. Return the completions and
    the number of steps."""
    # Room for guesses after the last token.
    sequences = [Running(engine, i, prompt, NUM_TOKENS + 8) for i, prompt in enumerate(PROMPTS)]
    for sequence in sequences:
        prefill(engine, sequence, params, 64)
    num_steps = 0
    while running := [
        (sequence, right)
        for sequence, right in zip(sequences, expected, strict=True)
        if len(sequence.results) < NUM_TOKENS
    ]:
        num_steps += 1
        guesses = []
        for sequence, right in running:
            after = ids(right)[len(sequence.results) :]
            own = after[: next(counts)]
            wrong_at = next(counts)
            if wrong_at < len(own):
                own[wrong_at] = (own[wrong_at] + 1) % VOCAB_SIZE
            guesses.append(own)
        rows = [
            rows_of(engine, sequence, params, own)
            for (sequence, _), own in zip(running, guesses, strict=True)
        ]
        results = iter(engine.runner.step([row for own in rows for row in own]))
        for (sequence, _), own in zip(running, guesses, strict=True):
            sampled = [next(results) for _ in range(1 + len(own))]
            for i, result in enumerate(sampled):
                assert result is not None
                sequence.results.append(result)
                if own[i : i + 1] != [result.token_id]:
                    break
    for owner in range(len(PROMPTS)):
        engine.ledger.release(owner)
    return [sequence.results[:NUM_TOKENS] for sequence in sequences], num_steps


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("block_size", [16, 5])
def test_guesses_right_and_wrong_change_no_bit_of_what_is_chosen(
    checkpoint: Callable[[str], Checkpoint],
    dtype: Dtype,
    block_size: int,
    backend: str,
    whole: bool,
) -> None:
    config = EngineConfig(
        dtype=dtype, backend=backend, block_size=block_size, kv_pool_bytes=4 * MIB
    )
    engine = open_engine(checkpoint("llama").path, config)
    for name, params in EVERYTHING.items():
        expected = generate(engine, PROMPTS, NUM_TOKENS, params)
        for seed in range(2 if whole else 1):
            engine.pool.poison(range(1, engine.pool.num_blocks))
            chance = np.random.default_rng(seed)
            counts = iter(lambda chance=chance: int(chance.integers(0, 8)), -1)
            results, num_steps = guessed(engine, expected, params, counts)
            assert results == expected, name
            assert num_steps < NUM_TOKENS - 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(Dtype))
def test_threads_change_no_bit_of_guesses(
    checkpoint: Callable[[str], Checkpoint], dtype: Dtype, backend: str
) -> None:
    config = EngineConfig(dtype=dtype, backend=backend, kv_pool_bytes=4 * MIB)
    engine = open_engine(checkpoint("llama").path, config)
    torch.set_num_threads(2)
    try:
        expected = generate(engine, PROMPTS, NUM_TOKENS)
        counts = iter(lambda: 3, -1)
        assert guessed(engine, expected, GREEDY, counts)[0] == expected
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", list(Dtype))
def test_guesses_of_quantised_weights_change_no_bit_either(quantised: Path, dtype: Dtype) -> None:
    if load_library() is None:
        pytest.skip("the kernels are not built for this machine")
    config = EngineConfig(dtype=dtype, backend="native", kv_pool_bytes=4 * MIB)
    engine = open_engine(quantised, config)
    expected = generate(engine, PROMPTS, NUM_TOKENS)
    results, num_steps = guessed(engine, expected, GREEDY, iter(lambda: 3, -1))
    assert results == expected
    assert num_steps < NUM_TOKENS - 1


def test_rows_that_continue_one_another_attend_together() -> None:
    table, other = [4, 2, 7], [5]
    rows = [
        StepRow([1], 6, table, is_decode=True),
        StepRow([2], 7, table, is_decode=True),
        StepRow([3], 8, table, is_decode=True),
        StepRow([4], 2, other, is_decode=True),
        StepRow([5, 6], 0, [9]),
    ]
    step = flatten(rows, block_size=4)
    assert step.continues == [False, True, True, False, False]
    tables, tasks = plan_tasks(step, task_tokens=16)
    found = {
        (task[3], task[1], task[2], *tables[task[0] : task[0] + -(-(task[1] + task[2]) // 4)])
        for task in tasks.tolist()
    }
    # First token, its position, number of tokens, and the blocks that they attend to.
    assert found == {(0, 6, 3, 4, 2, 7), (3, 2, 1, 5), (4, 0, 2, 9)}
    _, narrow = plan_tasks(step, task_tokens=2)
    assert sorted(task[1:3] for task in narrow.tolist()) == [[0, 2], [2, 1], [6, 2], [8, 1]]


def test_equal_tables_of_two_sequences_are_not_one() -> None:
    rows = [
        StepRow([1], 6, [1, 2], is_decode=True),
        StepRow([2], 7, [1, 2], is_decode=True),
    ]
    assert flatten(rows, block_size=4).continues == [False, False]


def test_tokens_followed_by_more_are_a_sequence() -> None:
    tokens = FollowedBy([1, 2, 3], (4, 5))
    assert len(tokens) == 5
    assert list(tokens) == [1, 2, 3, 4, 5]
    assert (tokens[0], tokens[4], tokens[-1]) == (1, 5, 5)
    assert tokens[2:] == (3, 4, 5)
    assert 4 in tokens
    assert not FollowedBy((), ())
