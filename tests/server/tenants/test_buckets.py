"""Tests of token buckets, estimates and money."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tenants.accounts import (
    GRAIN,
    MINUTE_S,
    NANOS,
    Bucket,
    TenantLimits,
    cost_of,
    limits_of,
    month_of,
)
from server.tenants.quotas import GROWTH, CompletionLengths
from triolet.tenants.plans import Plan, Prices

LIMITS = st.floats(1, 1e6)
STEPS = st.lists(
    st.tuples(st.floats(0, 30), st.floats(0.001, 1), st.booleans()), min_size=1, max_size=60
)
"""Seconds until the next request, its share of the limit, and whether it is refunded later."""


@given(LIMITS, STEPS)
def test_no_window_admits_more_than_its_refill_and_a_burst(
    limit: float, steps: list[tuple[float, float, bool]]
) -> None:
    bucket, now, net = Bucket(limit, 0.0), 0.0, [(0.0, 0.0)]
    to_refund = []
    for wait_s, part, is_refunded in steps:
        now += wait_s
        amount = part * limit
        if bucket.wait_s(amount, limit, now) == 0:
            bucket.charge(amount, limit, now)
            net.append((now, net[-1][1] + amount))
            if is_refunded:
                to_refund.append(amount)
        elif to_refund:
            amount = to_refund.pop()
            bucket.refund(amount)
            net.append((now, net[-1][1] - amount))
    for start, (from_s, before) in enumerate(net):
        for until_s, after in net[start + 1 :]:
            allowed = limit + (until_s - from_s) * limit / MINUTE_S
            assert after - before <= allowed * (1 + 1e-9) + GRAIN * len(net)


@given(LIMITS, st.lists(st.floats(0.001, 1), min_size=1, max_size=8), st.floats(0, 100))
def test_what_is_given_back_is_as_if_it_had_never_been_taken(
    limit: float, parts: list[float], later_s: float
) -> None:
    taken, untouched = Bucket(limit / 2, 0.0), Bucket(limit / 2, 0.0)
    for part in parts:
        taken.charge(part * limit, limit, 1.0)
    for part in reversed(parts):
        taken.refund(part * limit)
    now = 1.0 + later_s
    assert taken.level_at(limit, now) == pytest.approx(untouched.level_at(limit, now), rel=1e-9)


@given(LIMITS, st.floats(0.001, 1), st.floats(-5, 1))
def test_who_waits_as_long_as_it_is_told_is_admitted(
    limit: float, part: float, level: float
) -> None:
    bucket = Bucket(level * limit, 7.0)
    wait_s = bucket.wait_s(part * limit, limit, 7.0)
    assert bucket.wait_s(part * limit, limit, 7.0 + wait_s * (1 + 1e-9) + 1e-9) == 0
    if wait_s > 1e-3:
        assert bucket.wait_s(part * limit, limit, 7.0 + wait_s * 0.99) > 0


def test_what_goes_beyond_is_a_debt() -> None:
    bucket = Bucket(60.0, 0.0)
    bucket.charge(90.0, 60.0, 0.0)
    assert bucket.level_at(60.0, 10.0) == -20.0
    assert bucket.wait_s(1.0, 60.0, 0.0) == pytest.approx(31.0, abs=1e-5)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = Bucket(5.0, 100.0)
    bucket.charge(1.0, 60.0, 40.0)
    assert bucket.level_at(60.0, 100.0) == 4.0


@given(st.lists(st.integers(1, 100_000), min_size=20, max_size=300))
def test_nine_of_ten_completions_are_within_the_estimate_and_it_is_tight(sizes: list[int]) -> None:
    lengths = CompletionLengths()
    for size in sizes:
        lengths.add(size)
    estimate = lengths.p90()
    assert sum(size <= estimate for size in sizes) >= 0.9 * len(sizes)
    exact = sorted(sizes)[-(-9 * len(sizes) // 10) - 1]
    assert estimate <= GROWTH * exact + 1


def test_the_estimate_follows_a_tenant_that_changes() -> None:
    lengths = CompletionLengths()
    for size in [1000] * 5000 + [10] * 3000:
        lengths.add(size)
    assert lengths.p90() <= 12


def test_money_is_counted_in_whole_numbers_and_cached_tokens_are_cheaper() -> None:
    prices = Prices(prompt=0.15, cached_prompt=0.075, completion=0.6)
    assert cost_of(prices, 1_000_000, 0, 0) == 0.15 * NANOS
    assert cost_of(prices, 1000, 400, 100) == 600 * 150 + 400 * 75 + 100 * 600


def test_limits_are_those_of_the_plan_and_can_be_divided() -> None:
    limits = limits_of(Plan(requests_per_minute=10, tokens_per_minute=99, max_concurrent=2))
    assert limits == TenantLimits(10, 99, 2, None)
    assert limits.shared_by(3) == TenantLimits(10 / 3, 33, 1, None)
    assert limits_of(Plan(budget=1.5)).shared_by(4) == TenantLimits(budget=1_500_000_000)
    assert not limits_of(Plan()).are_any


def test_months_are_those_of_utc() -> None:
    eve = datetime(2031, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()
    assert [month_of(eve), month_of(eve + 1)] == ["2031-12", "2032-01"]
    assert all(a <= b for a, b in pairwise(month_of(eve + day * 86400) for day in range(800)))
