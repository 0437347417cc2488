"""Tests of the retry budget: one event costs one token however many attempts it struck."""

from __future__ import annotations

from itertools import count as count_from

from hypothesis import given
from hypothesis import strategies as st

from server.scheduling.recovery import ONE_FAULT_S, RetryBudget
from triolet.config import RecoveryConfig

ANOTHER = count_from(1000)
CONFIG = RecoveryConfig(retry_share=0.1, retry_burst=5.0, retry_floor_per_s=0.5)


def spend_all(budget: RetryBudget, now: float) -> int:
    """Return how many separate faults can be paid for."""
    count = 0
    while budget.take(next(ANOTHER), now):
        count += 1
    return count


def test_a_burst_can_be_paid_for_and_no_more() -> None:
    assert spend_all(RetryBudget(CONFIG, 0.0), 0.0) == 5


def test_one_event_costs_one_token_and_its_answer_stands() -> None:
    budget = RetryBudget(CONFIG, 0.0)
    assert all(budget.take("a death", 0.0) for _ in range(1000))
    assert budget.tokens == 4
    spend_all(budget, 0.0)
    assert not budget.take("another death", 0.0)
    assert budget.take("a death", ONE_FAULT_S)
    assert not budget.take("another death", ONE_FAULT_S - 0.1)


def test_the_same_event_later_is_another_one() -> None:
    budget = RetryBudget(CONFIG, 0.0)
    budget.take("a path", 0.0)
    assert not budget.is_new("a path", ONE_FAULT_S)
    assert budget.is_new("a path", ONE_FAULT_S + 0.1)


def test_requests_and_time_pay_in_up_to_the_burst() -> None:
    budget = RetryBudget(CONFIG, 0.0)
    spend_all(budget, 0.0)
    for _ in range(20):
        budget.earn()
    assert spend_all(budget, 0.0) == 2
    assert spend_all(budget, 6.0) == 3
    for _ in range(1000):
        budget.earn()
    assert spend_all(budget, 1e6) == 5


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_no_more_is_spent_than_was_paid_in(events: list[tuple[float, int, int]]) -> None:
    budget, now, spent, earned = RetryBudget(CONFIG, 0.0), 0.0, 0, 0
    for seconds, fault, num_requests in events:
        now += seconds
        for _ in range(num_requests):
            budget.earn()
            earned += 1
        is_new = budget.is_new(fault, now)
        spent += budget.take(fault, now) and is_new
        assert 0.0 <= budget.tokens <= CONFIG.retry_burst
    paid_in = earned * CONFIG.retry_share + now * CONFIG.retry_floor_per_s
    assert spent <= CONFIG.retry_burst + paid_in + 1e-6
