"""Tests of the token budget of an engine step: the first estimate, and how measured steps adjust
it."""

from __future__ import annotations

import pytest

from engine.pace import StepBudget, pace_of
from triolet.config import EngineConfig

CONFIG = EngineConfig(block_size=16, max_num_batched_tokens=512, target_step_s=0.1)


@pytest.mark.parametrize(
    ("elapsed_s", "expected"),
    [
        (0.0, (512, 0.0)),  # faster than the clock can tell
        (0.01, (512, 0.08)),  # fast: the setting is the bound
        (0.05, (128, 0.1)),  # twice as many tokens fit into the target
        (0.2, (32, 0.2)),  # half of them fit; a step may still take as long as measured
        (10.0, (16, 10.0)),  # a large model: one block at a time
    ],
)
def test_the_budget_keeps_a_step_within_its_target(
    elapsed_s: float, expected: tuple[int, float]
) -> None:
    pace = pace_of(64, elapsed_s, CONFIG)
    assert pace.step_tokens == expected[0]
    assert pace.step_s == pytest.approx(expected[1])


def test_the_budget_shrinks_on_a_busy_machine_and_grows_back() -> None:
    budget = StepBudget(pace_of(64, 0.05, CONFIG))
    assert budget.tokens == 128
    for _ in range(20):
        budget.took(budget.tokens, elapsed_s=budget.tokens * 0.1 / 40)  # 40 tokens in the target
    assert budget.tokens == pytest.approx(40, abs=1)
    for _ in range(20):
        budget.took(budget.tokens, elapsed_s=budget.tokens * 0.1 / 1000)
    assert budget.tokens == pytest.approx(512, abs=4)
    for _ in range(40):
        budget.took(budget.tokens, elapsed_s=100.0)
    assert budget.tokens == CONFIG.block_size


def test_one_hiccup_moves_the_budget_by_a_quarter_and_small_steps_by_nothing() -> None:
    budget = StepBudget(pace_of(64, 0.05, CONFIG))
    budget.took(63, elapsed_s=100.0)
    budget.took(128, elapsed_s=0.0)
    assert budget.tokens == 128
    budget.took(128, elapsed_s=100.0)
    assert budget.tokens == 100


@pytest.mark.parametrize(
    ("elapsed_s", "most_tokens", "expected"),
    [
        (10.0, 4096, 64),  # a large model: as many as were timed, not one block
        (0.05, 4096, 128),  # what fits into the target
        (0.002, 4096, 2048),  # fast: four times the setting of prompts
        (0.002, 1024, 1024),  # or what a batch may hold
        (0.002, 1, 512),  # one by one: an input is not cut smaller than a prompt
    ],
)
def test_a_step_for_which_nobody_waits_is_wide(
    elapsed_s: float, most_tokens: int, expected: int
) -> None:
    pace = pace_of(64, elapsed_s, CONFIG)
    if elapsed_s < 0.01:
        pace = pace._replace(step_s=0.008)  # 512 tokens; a step that took no time says nothing
    budget = StepBudget.of_wide_steps(pace, most_tokens)
    assert budget.tokens == expected
    for _ in range(60):
        budget.took(budget.tokens, elapsed_s=100.0)
    assert budget.tokens == 64
