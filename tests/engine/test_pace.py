"""A worker's budget of tokens follows from one timed step."""

from __future__ import annotations

import pytest

from engine.pace import Pace, pace_of
from triolet.config import EngineConfig

CONFIG = EngineConfig(block_size=16, max_num_batched_tokens=512, target_step_s=0.1)


@pytest.mark.parametrize(
    ("elapsed_s", "expected"),
    [
        (0.0, Pace(512, 0.0)),  # faster than the clock can tell
        (0.01, Pace(512, 0.08)),  # fast: the setting is the bound
        (0.05, Pace(128, 0.1)),  # twice as many tokens fit into the target
        (0.2, Pace(32, 0.2)),  # half of them fit; a step may still take as long as measured
        (10.0, Pace(16, 10.0)),  # a large model: one block at a time
    ],
)
def test_the_budget_keeps_a_step_within_its_target(elapsed_s: float, expected: Pace) -> None:
    pace = pace_of(64, elapsed_s, CONFIG)
    assert pace.step_tokens == expected.step_tokens
    assert pace.step_s == pytest.approx(expected.step_s)
