"""Tests of how many tokens each row speculates: more while guesses are accepted, fewer after
rejected ones, and none while speculation does not pay."""

from __future__ import annotations

import random

import msgspec
import pytest

from decode.speculation import FIRST_LENGTH, GuessPace
from triolet.config import SpeculationConfig

CONFIG = SpeculationConfig(max_guesses=8, pause_rows=4, max_pause_rows=16)


def run(share: float, num_rows: int) -> tuple[int, int, int]:
    """Accept each guess with probability `share`; return the numbers of rows with guesses, of all
    guesses, and of accepted guesses."""
    pace, chance = GuessPace(CONFIG), random.Random(1)
    guessing = proposed = accepted = 0
    for _ in range(num_rows):
        if not pace.length:
            pace.went_without()
            continue
        held = 0
        while held < pace.length and chance.random() < share:
            held += 1
        guessing, proposed, accepted = guessing + 1, proposed + pace.length, accepted + held
        pace.went(pace.length, held)
    return guessing, proposed, accepted


def test_a_copy_soon_has_all_the_guesses_there_are() -> None:
    pace, lengths = GuessPace(CONFIG), []
    for _ in range(4):
        lengths.append(pace.length)
        pace.went(pace.length, pace.length)
    assert lengths == [FIRST_LENGTH, 2 * FIRST_LENGTH, 8, 8]


def test_a_guess_that_fails_cuts_the_next_ones_to_what_held() -> None:
    pace = GuessPace(CONFIG)
    pace.went(8, 3)
    assert pace.length == 3
    pace.went(3, 0)
    assert pace.length == 1


def test_where_nothing_holds_hardly_anything_is_guessed() -> None:
    guessing, proposed, accepted = run(0.0, 1000)
    assert accepted == 0
    assert guessing == proposed - FIRST_LENGTH + 1  # one guess each but for the first
    assert proposed < 1000 / 14


def test_where_all_holds_every_row_guesses() -> None:
    guessing, proposed, accepted = run(1.0, 100)
    assert guessing == 100
    assert proposed == accepted > 700


def test_where_half_holds_it_goes_on() -> None:
    guessing, proposed, accepted = run(0.5, 1000)
    assert guessing > 800
    assert accepted / proposed > 0.35


def test_a_pause_doubles_with_each_trial_that_fails_and_shrinks_with_one_that_holds() -> None:
    pace, pauses = GuessPace(CONFIG), []
    for _ in range(40):
        while pace.length:
            pace.went(pace.length, 0)
        rows = 0
        while not pace.length:
            pace.went_without()
            rows += 1
        pauses.append(rows)
    assert pauses[:4] == [4, 8, 16, 16]
    pace.went(1, 1)
    while pace.length:
        pace.went(pace.length, 0)
    rows = 0
    while not pace.length:
        pace.went_without()
        rows += 1
    assert rows == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_guesses", 0), ("max_step_tokens", 1), ("min_ngram", 9), ("pause_rows", 0)],
)
def test_a_bound_that_cannot_be_is_refused(name: str, value: int) -> None:
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.convert({name: value}, SpeculationConfig)
