"""The calendar of promised work: one capacity for all classes, and part of it for each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.fleet.bookings import FILL, SLOT_S, Bookings
from triolet.service_class import ServiceClass as C


def test_work_of_a_class_is_booked_behind_its_own() -> None:
    bookings = Bookings(100.0)
    begins = []
    for _ in range(4):
        begins.append(bookings.begin_s(C.DEFAULT, 1.0, 0.0))
        bookings.book(C.DEFAULT, 1.0, SLOT_S * FILL[C.DEFAULT], 0.0)
    assert begins == [1.0, 1.0 + SLOT_S, 1.0 + 2 * SLOT_S, 1.0 + 3 * SLOT_S]


def test_work_that_cannot_begin_for_long_leaves_what_is_sooner_to_others() -> None:
    bookings = Bookings(100.0)
    bookings.book(C.DEFAULT, 50.0, 10.0, 0.0)
    assert bookings.begin_s(C.DEFAULT, 1.0, 0.0) == 1.0
    assert bookings.begin_s(C.DEFAULT, 51.0, 0.0) == pytest.approx(50.0 + 10.0 / 0.8, abs=SLOT_S)
    bookings.book(C.DEFAULT, 0.0, 45.0, 0.0)
    assert bookings.begin_s(C.DEFAULT, 0.0, 0.0) == pytest.approx(55.0 / 0.8, abs=SLOT_S)


def test_a_higher_class_finds_room_beside_what_a_lower_one_has_booked_and_not_in_it() -> None:
    bookings = Bookings(100.0)
    bookings.book(C.SHEDDABLE, 0.0, 10.0, 0.0)
    assert bookings.begin_s(C.SHEDDABLE, 0.0, 0.0) == pytest.approx(10.0 / 0.3, abs=SLOT_S)
    assert bookings.begin_s(C.DEFAULT, 0.0, 0.0) == 0.0
    bookings.book(C.DEFAULT, 0.0, 10.0, 0.0)
    assert bookings.begin_s(C.DEFAULT, 0.0, 0.0) == pytest.approx(10.0 / 0.5, abs=2 * SLOT_S)
    # What is full is full for all below.
    assert bookings.begin_s(C.BATCH, 0.0, 0.0) == pytest.approx(10.0 / 0.3, abs=SLOT_S)


def test_beyond_its_end_the_calendar_books_nothing() -> None:
    bookings = Bookings(10.0)
    bookings.book(C.DEFAULT, 0.0, 100.0, 0.0)
    assert bookings.begin_s(C.DEFAULT, 0.0, 0.0) == 10.0
    assert bookings.begin_s(C.DEFAULT, 50.0, 0.0) == 50.0
    # Time makes room again.
    bookings.book(C.DEFAULT, 0.0, 1.0, 100.0)
    assert bookings.begin_s(C.DEFAULT, 0.0, 100.0) == pytest.approx(1.0 / 0.8, abs=SLOT_S)


@given(
    st.lists(
        st.tuples(st.sampled_from(list(C)), st.floats(0.0, 5.0), st.floats(0.0, 3.0)), max_size=50
    )
)
def test_no_class_fills_more_than_it_may_and_nothing_begins_before_there_is_room(
    asked: list[tuple[C, float, float]],
) -> None:
    bookings, now, booked_s = Bookings(1000.0), 0.0, 0.0
    for own, room_in_s, work_s in asked:
        was_s = bookings.begin_s(own, room_in_s, now)
        assert was_s >= room_in_s
        bookings.book(own, room_in_s, work_s, now)
        assert bookings.begin_s(own, room_in_s, now) >= was_s
        booked_s += work_s
        # Whatever was asked for is booked from its room on, so that all of it lies before this.
        last_s = bookings.begin_s(C.BATCH, 10.0 + booked_s / FILL[C.BATCH], 0.0) + SLOT_S
        assert booked_s <= max(FILL.values()) * last_s + 1e-6
        now += 0.1
