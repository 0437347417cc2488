"""Tests that the GPU's copy of each sequence's KV blocks, length and last token stays right while
sequences join, leave, grow and change places in the batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import SampleSpec, StepRow
from engine.block_ledger import SCRATCH_BLOCK
from engine.gpu.buckets import bucket_sizes
from engine.gpu.decode_rows import (
    LENGTH,
    MIN_P,
    NO_SOURCE,
    POSITION,
    SEED,
    SOURCE,
    TEMPERATURE,
    TOKEN,
    Arrangement,
    DecodeRows,
)
from triolet.sampling import SamplingParams

BLOCK_SIZE = 4
MAX_ROWS = 20


@dataclass(eq=False)
class Sequence:
    """A sequence being decoded."""

    number: int
    length: int
    blocks: list[int] = field(default_factory=list)


class Device:
    """The device's state, updated by arrangements only."""

    def __init__(self) -> None:
        self.tables = np.zeros((MAX_ROWS, 50), dtype=np.int64)
        self.chosen = np.full(MAX_ROWS, -7)

    def run(self, arrangement: Arrangement) -> list[int]:
        """Return each place's token, and sample the next one: the last plus a thousand."""
        places, columns, blocks = arrangement.patches
        self.tables[places, columns] = blocks
        source, token = arrangement.fields[SOURCE], arrangement.fields[TOKEN]
        tokens = np.where(source == NO_SOURCE, token, self.chosen[source])
        self.chosen[: arrangement.size] = tokens + 1000
        result: list[int] = tokens.tolist()
        return result


@given(st.lists(st.sets(st.integers(0, MAX_ROWS - 1), min_size=1), max_size=25), st.booleans())
def test_the_device_always_knows_what_it_must(steps: list[set[int]], fixed: bool) -> None:
    rows = DecodeRows(bucket_sizes(MAX_ROWS, fixed=fixed), BLOCK_SIZE)
    device = Device()
    sequences = {n: Sequence(n, 3 * n + 1) for n in range(MAX_ROWS)}
    next_block = iter(range(1, 100_000))
    before: dict[int, int] = {}
    expected: dict[int, int] = {}
    for step in steps:
        running = [sequences[n] for n in sorted(step, key=lambda n: (n * 7) % 11)]
        batch = []
        for sequence in running:
            while len(sequence.blocks) * BLOCK_SIZE <= sequence.length:
                sequence.blocks.append(next(next_block))
            follows = before.get(sequence.number)
            token = 0 if follows is not None else sequence.number
            batch.append(
                StepRow([token], sequence.length, sequence.blocks, is_decode=True, follows=follows)
            )
        arrangement = rows.arrange(batch)
        tokens = device.run(arrangement)
        assert len(set(arrangement.places)) == len(running)
        for sequence, place in zip(running, arrangement.places, strict=True):
            was_there = sequence.number in before
            wanted = expected[sequence.number] + 1000 if was_there else sequence.number
            assert tokens[place] == wanted
            expected[sequence.number] = wanted
            sequence.length += 1
            assert arrangement.fields[LENGTH, place] == sequence.length
            num_blocks = -(-sequence.length // BLOCK_SIZE)
            assert device.tables[place, :num_blocks].tolist() == sequence.blocks[:num_blocks]
        for place in set(range(arrangement.size)) - set(arrangement.places):
            assert device.tables[place, 0] == SCRATCH_BLOCK
            assert arrangement.fields[LENGTH, place] == 1
        before = {sequence.number: index for index, sequence in enumerate(running)}


def test_a_row_that_goes_on_is_told_only_what_is_new() -> None:
    rows = DecodeRows((2, 4), BLOCK_SIZE)
    blocks = [5, 9]
    first = rows.arrange([StepRow([1], 6, blocks, is_decode=True)])
    assert first.patches.T.tolist() == [[0, 0, 5], [0, 1, 9], [1, 0, 0]]
    second = rows.arrange([StepRow([0], 7, blocks, is_decode=True, follows=0)])
    assert second.patches.shape == (3, 0)
    third = rows.arrange([StepRow([0], 8, [*blocks, 7], is_decode=True, follows=0)])
    assert third.patches.T.tolist() == [[0, 2, 7]]


def test_what_a_failed_step_has_not_told_is_told_with_the_next() -> None:
    rows = DecodeRows((2, 4), BLOCK_SIZE)
    row = StepRow([1], 6, [5, 9], is_decode=True)
    told = rows.arrange([row]).patches.T.tolist()
    rows.forget_tables()
    assert rows.arrange([row]).patches.T.tolist() == told


def test_what_decides_a_token_travels_bit_for_bit() -> None:
    params = SamplingParams(temperature=0.7, min_p=0.05, seed=2**62 + 3)
    row = StepRow([1], 6, [5, 9], SampleSpec(params, 12), is_decode=True)
    fields = DecodeRows((1,), BLOCK_SIZE).arrange([row]).fields
    assert (fields[SEED, 0], fields[POSITION, 0]) == (2**62 + 3, 12)
    assert fields[TEMPERATURE].view(np.float64)[0] == 0.7
    assert fields[MIN_P].view(np.float64)[0] == 0.05
