"""Tests of prompt lookup: the guesses for the next tokens are those that followed the last tokens
at an earlier place of the sequence."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.drafts import History, Lookup
from tests.decode.test_scheduler import attempt
from triolet.config import LOOKUP, SpeculationConfig

CONFIG = SpeculationConfig(source=LOOKUP, min_ngram=2, max_ngram=4)


def guess(tokens: list[int], most: int = 4, config: SpeculationConfig = CONFIG) -> tuple[int, ...]:
    return History(tokens).guess(most, config)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param([], (), id="nothing"),
        pytest.param([5], (), id="too-short"),
        pytest.param([5, 6], (), id="only-itself"),
        pytest.param([1, 2, 3, 4, 5, 9, 1, 2], (3, 4, 5, 9), id="a-copy"),
        pytest.param([1, 2, 3, 9, 3, 2], (), id="no-such-pair"),
        pytest.param([1, 2, 7, 7, 1, 2, 8, 8, 1, 2], (8, 8, 1, 2), id="the-latest-of-equals"),
        pytest.param(
            [0, 1, 2, 7, 7, 5, 1, 2, 8, 8, 0, 1, 2], (7, 7, 5, 1), id="the-longest-common-past"
        ),
        pytest.param([3, 3, 3], (3, 3, 3, 3), id="a-repetition-of-one"),
        pytest.param([1, 2, 3, 1, 2, 3, 1, 2], (3, 1, 2, 3), id="a-repetition-of-three"),
        pytest.param([256, 1, 9, 65_536, 256, 1], (9, 65_536, 256, 1), id="bytes-of-zero"),
    ],
)
def test_guesses_of_a_look_up(tokens: list[int], expected: tuple[int, ...]) -> None:
    assert guess(tokens) == expected


def test_as_many_as_are_wanted() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2]
    assert [guess(tokens, most) for most in range(4)] == [(), (3,), (3, 4), (3, 4, 5)]


def test_what_is_too_long_ago_is_not_looked_at() -> None:
    tokens = [1, 2, 3, *range(100, 120), 1, 2]
    assert guess(tokens)[0] == 3
    near = SpeculationConfig(source=LOOKUP, max_lookback_tokens=20)
    assert guess(tokens, config=near) == ()


def test_bytes_that_only_look_like_the_tokens_are_none() -> None:
    # [256, 0] as bytes stands one byte further in [65536, 0]: no token ends there.
    assert guess([65_536, 0, 7, 256, 0]) == ()


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 9))
def test_it_finds_what_a_plain_search_finds(tokens: list[int], most: int) -> None:
    config = SpeculationConfig(source=LOOKUP, max_ngram=64)
    best, longest = None, 0
    for after in range(len(tokens) - 1, 1, -1):
        length = 0
        while length < after and tokens[after - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= 2 and length > longest:
            best, longest = after, length
    expected = list(tokens)
    for i in range(most if best is not None else 0):
        assert best is not None
        expected.append(expected[best + i])
    assert guess(tokens, most, config) == tuple(expected[len(tokens) :])


def test_a_sequence_s_history_grows_with_it_and_ends_with_it() -> None:
    lookup, sequence = Lookup(CONFIG), attempt(1)
    chance = random.Random(3)
    for _ in range(40):
        sequence.output_ids += [chance.randrange(3) for _ in range(chance.randrange(3))]
        expected = guess([*sequence.prompt_ids, *sequence.output_ids])
        assert tuple(lookup.guess(sequence, 4)) == expected
    lookup.forget(sequence.key)
    lookup.forget(sequence.key)
    assert not lookup._histories
