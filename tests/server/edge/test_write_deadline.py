"""Tests of the write deadline: how long a write waits for a client that reads slowly or not at
all."""

from __future__ import annotations

import pytest

from server.edge.tcp import ENOUGH_BYTES, FIRST_WAIT_S, LAST_WAIT_S, WriteDeadline

LIMIT_S = 10.0


def waits_until_over(patience: WriteDeadline) -> list[float]:
    """Return the waits of a write to a client that reads nothing."""
    waits: list[float] = []
    while not patience.is_over:
        assert sum(waits) <= 2 * LIMIT_S, "it never ends"
        waits.append(patience.wait_s)
        patience.waited(patience.wait_s)
    return waits


def test_it_lasts_as_long_as_it_may_and_tries_often_at_first() -> None:
    waits = waits_until_over(WriteDeadline(LIMIT_S))
    assert sum(waits) == pytest.approx(LIMIT_S)
    assert waits[:4] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S, 8 * FIRST_WAIT_S]
    assert set(waits[5:-1]) == {LAST_WAIT_S}


def test_bytes_taken_bring_the_short_waits_back_but_no_time() -> None:
    patience = WriteDeadline(LIMIT_S)
    for _ in range(8):
        patience.waited(patience.wait_s)
    assert patience.wait_s == LAST_WAIT_S
    left_s = sum(waits_until_over(patience))

    patience = WriteDeadline(LIMIT_S)
    for _ in range(8):
        patience.waited(patience.wait_s)
    patience.took(ENOUGH_BYTES - 1)
    assert patience.wait_s == FIRST_WAIT_S
    assert sum(waits_until_over(patience)) == pytest.approx(left_s)


def test_enough_bytes_bring_all_its_time_back_however_slowly_they_go() -> None:
    patience = WriteDeadline(LIMIT_S)
    for _ in range(ENOUGH_BYTES // 1024):
        patience.waited(0.9 * LIMIT_S * 1024 / ENOUGH_BYTES)
        patience.took(1024)
    assert sum(waits_until_over(patience)) == pytest.approx(LIMIT_S)


def test_who_takes_less_than_enough_is_not_waited_for_for_ever() -> None:
    patience = WriteDeadline(LIMIT_S)
    waits = 0
    while not patience.is_over and waits < ENOUGH_BYTES - 1:
        patience.waited(patience.wait_s)
        patience.took(1)
        waits += 1
    assert waits == round(LIMIT_S / FIRST_WAIT_S)


def test_a_standstill_of_our_own_is_not_the_clients() -> None:
    patience = WriteDeadline(LIMIT_S)
    patience.waited(1000 * LIMIT_S)
    assert sum(waits_until_over(patience)) == pytest.approx(LIMIT_S - FIRST_WAIT_S)
