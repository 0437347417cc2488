"""Tests of the arena allocator for runs of units: runs never overlap, and each is freed exactly
once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.gpu.arena import Arena


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=60))
def test_runs_never_overlap(moves: list[tuple[bool, int]]) -> None:
    arena = Arena(12)
    held: list[tuple[int, int]] = []
    for takes, number in moves:
        if takes:
            first = arena.take(number)
            if first is not None:
                held.append((first, number))
        elif held:
            arena.give(*held.pop(number % len(held)))
        units = [unit for first, count in held for unit in range(first, first + count)]
        assert len(units) == len(set(units))
        assert all(0 <= unit < 12 for unit in units)
        assert arena.free_units == 12 - len(units)
    for run in held:
        arena.give(*run)
    assert arena.take(12) == 0


def test_a_run_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    arena = Arena(4)
    assert arena.take(3) == 0
    assert arena.take(2) is None
    assert arena.take(1) == 3
    arena.give(0, 3)
    assert arena.take(3) == 0


def test_a_run_is_not_given_back_twice() -> None:
    arena = Arena(4)
    arena.take(2)
    arena.give(0, 2)
    with pytest.raises(AssertionError, match="freed twice"):
        arena.give(0, 2)
