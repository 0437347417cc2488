"""Tests of the random number generator: it gives the known answers of Philox4x64-10, and its
numbers are uniform."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.philox import philox4x64, uniform

WORDS = st.integers(0, 2**64 - 1)
ONES = 2**64 - 1


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # The vectors published with the generator (Random123's kat_vectors).
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
        ),
        (
            (ONES, ONES, ONES, ONES),
            (ONES, ONES),
            (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
        ),
    ],
)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox4x64(counter, key) == expected


@settings(deadline=None)
@given(st.tuples(WORDS, WORDS, WORDS, WORDS), st.tuples(WORDS, WORDS))
def test_numpy_agrees(counter: tuple[int, int, int, int], key: tuple[int, int]) -> None:
    # numpy increments the counter before it generates.
    as_number = sum(word << (64 * index) for index, word in enumerate(counter))
    before = (as_number - 1) % 2**256
    start = np.array([(before >> (64 * index)) & ONES for index in range(4)], dtype=np.uint64)
    generator = np.random.Philox(counter=start, key=np.array(key, dtype=np.uint64))
    assert philox4x64(counter, key) == tuple(int(word) for word in generator.random_raw(4))


def test_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    for numbers in (
        [uniform(3, position) for position in range(4000)],
        [uniform(seed, 3) for seed in range(4000)],
    ):
        assert all(0.0 <= number < 1.0 for number in numbers)
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        chi_square = ((counts - 200) ** 2 / 200).sum()
        assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
