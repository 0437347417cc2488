"""Tests of a worker's estimates of its own speed, and of how many prompt tokens a decode step may
include."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pace import Pace
from worker.rates import MIN_TOKENS, StepRates

PACE = Pace(
    step_tokens=50,
    step_s=0.05,
    target_s=0.05,
    least_tokens=16,
    most_tokens=512,
    chunk_tokens=64,
)


def test_at_the_start_the_timed_step_is_believed() -> None:
    rates = StepRates(PACE)
    assert rates.prompt_tokens_per_s == pytest.approx(1000)
    assert rates.step_s == 0.0
    assert StepRates(PACE._replace(step_s=0.0)).prompt_tokens_per_s == 0.0


def test_a_prompt_is_charged_what_it_adds_to_a_step() -> None:
    rates = StepRates(PACE)
    for _ in range(100):
        rates.took(0.02, num_prompt_tokens=0, num_decode_rows=8)
        rates.took(0.02 + 64 / 2000, num_prompt_tokens=64, num_decode_rows=8)
    assert rates.step_s == pytest.approx(0.02)
    assert rates.prompt_tokens_per_s == pytest.approx(2000, rel=0.05)


def test_borrowed_cores_are_not_counted_upon() -> None:
    rates = StepRates(PACE)
    for _ in range(100):
        rates.took(0.010, num_prompt_tokens=0, num_decode_rows=8, speedup=2.0)
        rates.took(0.020, num_prompt_tokens=0, num_decode_rows=8, speedup=3.0)
    assert 0.015 < rates.step_s < 0.040, "of two cores each has half of what memory gives one"
    rates = StepRates(PACE)
    for _ in range(100):
        rates.took(0.032, num_prompt_tokens=128, speedup=2.0)
    assert rates.prompt_tokens_per_s == pytest.approx(2000, rel=0.01)


def test_a_rate_that_is_not_seen_again_is_forgotten() -> None:
    rates = StepRates(PACE)
    rates.took(100.0, num_prompt_tokens=64)
    slow = rates.prompt_tokens_per_s
    assert slow < 810
    for _ in range(300):
        rates.took(0.02, num_prompt_tokens=0, num_decode_rows=8)
    assert rates.prompt_tokens_per_s == pytest.approx(1000, rel=0.02)
    unknown = StepRates(PACE._replace(step_s=0.0))
    unknown.took(0.064, num_prompt_tokens=64)
    unknown.took(0.02, num_prompt_tokens=0, num_decode_rows=8)
    assert unknown.prompt_tokens_per_s == pytest.approx(1000), "there is nothing to go back to"


def test_a_few_tokens_and_a_clock_that_stood_still_say_nothing_of_a_rate() -> None:
    rates = StepRates(PACE)
    rates.took(1.0, num_prompt_tokens=MIN_TOKENS - 1)
    rates.took(0.0, num_prompt_tokens=512)
    assert rates.prompt_tokens_per_s == pytest.approx(1000)


def test_beside_streams_a_chunk_keeps_the_step_within_its_target() -> None:
    rates = StepRates(PACE)
    assert rates.chunk_tokens(0) == 50
    rates.took(0.01, num_prompt_tokens=0, num_decode_rows=8)
    assert rates.chunk_tokens(8) == 40
    rates.took(10.0, num_prompt_tokens=0, num_decode_rows=8)
    assert rates.chunk_tokens(8) == PACE.least_tokens, "a prompt gets on all the same"
    fast = StepRates(PACE._replace(step_s=1e-6))
    assert fast.chunk_tokens(8) == PACE.chunk_tokens
    assert fast.chunk_tokens(0) == PACE.most_tokens


steps = st.tuples(st.floats(0, 100), st.integers(0, 1000), st.integers(0, 64))


@given(st.lists(steps, max_size=30), st.integers(0, 64))
def test_whatever_steps_take_the_numbers_can_travel(
    taken: list[tuple[float, int, int]], rows: int
) -> None:
    rates = StepRates(PACE)
    for elapsed_s, num_prompt_tokens, num_decode_rows in taken:
        rates.took(elapsed_s, num_prompt_tokens=num_prompt_tokens, num_decode_rows=num_decode_rows)
    assert 0 <= rates.step_s <= 100
    assert rates.prompt_tokens_per_s >= 0
    assert PACE.least_tokens <= rates.chunk_tokens(rows) <= PACE.most_tokens
