"""Tests of the forecast: which shares a day's traffic suffices for."""

from __future__ import annotations

import pytest

from ops.rollouts.forecast import forecast

from .rollout_cases import plan

STEPS = (0.01, 0.1, 0.5, 1.0)


def test_enough_users_keep_the_plan() -> None:
    # 100 requests a day are 4.2 an hour: 98.4 % of 2,100 users are active, 20.7 of them at 1 %.
    found = forecast(plan(shares=STEPS, min_requests=20), [100] * 2_100)
    assert found.shares == STEPS
    assert found.said == (
        "a step of 1% needs about 2,000 active users and 2,000 requests within 3600 s; from the "
        "traffic of a day, 2,067 and 8,746 are expected"
    )


def test_too_few_users_get_a_larger_first_step() -> None:
    found = forecast(plan(shares=STEPS, min_requests=20), [100] * 250)
    assert found.shares == (0.1, 0.5, 1.0)
    assert found.said.endswith("; use 10%")


@pytest.mark.parametrize(
    ("users", "requests", "shares"),
    [
        (2_000, 2_400, STEPS),  # 200,000 requests an hour, 2,000 of them at 1 %
        (2_000, 200, (0.02, 0.1, 0.5, 1.0)),  # 16,660 requests an hour are too few for 1 %
        (5_000, 60, (0.02, 0.1, 0.5, 1.0)),  # 4,590 users are enough for 1 %, 12,500 requests not
        (100, 240, (0.3, 0.5, 1.0)),  # 20 % of 99.995 users are not 20
        (50, 2_400, (0.4, 0.5, 1.0)),
        (39, 2_400, ()),  # more than half would be needed
        (0, 0, ()),
    ],
)
def test_users_and_requests_decide(users: int, requests: int, shares: tuple[float, ...]) -> None:
    found = forecast(plan(shares=STEPS), [requests] * users)
    assert found.shares == shares
    assert found.said.endswith("at any share") == (not shares)


def test_the_heaviest_user_does_not_count() -> None:
    daily = [10] * 2_500
    assert forecast(plan(shares=STEPS), [*daily, 10**6]).shares == (
        forecast(plan(shares=STEPS), daily).shares
    )


def test_users_that_rarely_come_are_hardly_active() -> None:
    assert forecast(plan(shares=STEPS, min_requests=1), [1] * 10_000).shares == (
        0.05,
        0.1,
        0.5,
        1.0,
    )
