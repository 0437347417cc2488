"""Order of the line, and the prediction of its end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.fleet.relay import Relay
from server.fleet.sequence import Sequence, Times
from server.fleet.waiting import MEMORY_S, Pace, WaitingLine

from .fakes import make_request
from .world import TEXT


def waiting(order: int, priority: int = 0, prompt: str = "abc") -> Sequence:
    request = make_request(order, priority=priority, prompt=prompt)
    relay = Relay(request, TEXT)
    return Sequence(request, order, relay, 1e9, Times(0.0, 0.0), allowed=4)


@given(st.lists(st.integers(-2, 2), max_size=20), st.data())
def test_priority_first_then_first_come_first_served(
    priorities: list[int], data: st.DataObject
) -> None:
    sequences = [waiting(order, priority) for order, priority in enumerate(priorities)]
    line = WaitingLine()
    for sequence in data.draw(st.permutations(sequences)):
        line.add(sequence)
    expected = sorted(sequences, key=lambda s: (s.request.priority, s.order))
    assert list(line) == expected
    for sequence in data.draw(st.permutations(sequences)):
        line.remove(sequence)
        expected.remove(sequence)
        assert list(line) == expected
        assert not expected or line.first() is expected[0]


def test_only_what_goes_first_counts_as_ahead() -> None:
    line = WaitingLine()
    for order, priority in enumerate((-1, 0, 1)):
        line.add(waiting(order, priority, prompt="x" * 10**order))
    assert [line.tokens_ahead(priority) for priority in (-2, -1, 0, 5)] == [0, 1, 11, 111]


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
