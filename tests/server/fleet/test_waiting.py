"""The prediction of how long the line takes."""

from __future__ import annotations

import pytest

from server.fleet.waiting import MEMORY_S, Pace


def test_nothing_is_predicted_before_anything_was_measured() -> None:
    pace = Pace(0.0)
    assert pace.predict_s(1000, 10) is None
    pace.advance(100.0, is_waiting=False)
    assert pace.predict_s(1000, 10) is None


def test_an_empty_line_has_no_wait() -> None:
    pace = Pace(0.0)
    pace.advance(10.0, is_waiting=True)
    assert pace.predict_s(0, 10) is None


def test_the_prediction_is_what_is_ahead_by_the_measured_pace() -> None:
    pace = Pace(0.0)
    for second in range(1, 201):
        pace.left(100)
        pace.advance(float(second), is_waiting=True)
    predicted_s = pace.predict_s(1000, 0)
    assert predicted_s == pytest.approx(10.0, rel=0.05)


def test_a_line_that_has_not_moved_is_judged_by_what_runs() -> None:
    pace = Pace(0.0)
    pace.advance(5.0, is_waiting=True)
    assert pace.predict_s(640, 64) == pytest.approx(50.0)


def test_old_speed_is_forgotten() -> None:
    pace = Pace(0.0)
    for second in range(1, 60):
        pace.left(1000)
        pace.advance(float(second), is_waiting=True)
    fast = pace.predict_s(1000, 1)
    pace.advance(60.0 + 5 * MEMORY_S, is_waiting=True)
    slow = pace.predict_s(1000, 1)
    assert fast is not None
    assert slow is not None
    assert slow > 20 * fast
