"""Tests of counts over sliding windows, compared with a list of all events."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from server.slo.event_windows import SLOTS, EventCounts, EventWindows

SPANS_S = (30.0, 300.0, 3600.0)
BEGAN_AT = 1000.0


def counted(events: list[tuple[float, bool]], since: float) -> EventCounts:
    late = [is_good for at, is_good in events if at >= since]
    return EventCounts(sum(late), len(late))


@given(
    st.lists(
        st.tuples(st.floats(0, 400) | st.sampled_from([0.5, 30.0, 3600.0, 1e6]), st.booleans()),
        max_size=60,
    ),
    st.floats(0, 4000),
)
def test_a_window_holds_what_is_younger_and_nothing_that_is_older(
    steps: list[tuple[float, bool]], last_s: float
) -> None:
    now, events = BEGAN_AT, list[tuple[float, bool]]()
    windows = EventWindows(SPANS_S, BEGAN_AT)
    for step_s, is_good in steps:
        now += step_s
        windows.add(now, is_good=is_good)
        events.append((now, is_good))
    now += last_s
    for span_s in SPANS_S:
        found = windows.over(span_s, now)
        # A rounding error may move the start of a slot.
        least = counted(events, now - span_s * (SLOTS - 1) / SLOTS + 1e-6)
        most = counted(events, now - span_s - 1e-6)
        assert least.total <= found.total <= most.total
        assert least.good <= found.good <= most.good
        assert least.bad <= found.bad <= most.bad


def test_memory_is_constant() -> None:
    windows = EventWindows(SPANS_S, 0.0)

    def size() -> int:
        return sum(
            sys.getsizeof(one)
            for ring in windows._rings.values()
            for one in (ring.good, ring.total)
        )

    before = size()
    for number in range(10_000):
        windows.add(number * 0.7, is_good=number % 3 > 0)
    assert size() == before
    assert windows.over(3600.0, 7000.0).total <= 3600 / 0.7 + 1


def test_shares_are_of_all_events() -> None:
    assert EventCounts(3, 4).bad_share == 0.25
    assert EventCounts().bad_share is None
