"""Tests of the times at which refused requests are told to return, and of recognizing them when
they do."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from server.scheduling.overload import Demand, Level, Overload
from server.scheduling.status import OverloadObserver
from server.scheduling.wait_estimate import GRACE_S, MOST_S, PATIENCE_S, FleetCapacity, Returns
from triolet.config import AdmissionConfig, OverloadConfig, SloConfig
from triolet.errors import RequestError
from triolet.service_class import Scheduling, ServiceClass

RATE = 10_000.0
ROOM_S = 2.0
CONFIG = AdmissionConfig()
EXACT = AdmissionConfig(retry_jitter_least=1.0, retry_jitter_most=1.0)
ONE, OTHER, HEAVY = Scheduling("one"), Scheduling("other"), Scheduling("heavy", weight=3.0)
CRITICAL = Scheduling("other", service_class=ServiceClass.CRITICAL)


def told(
    returns: Returns,
    key: int,
    work_s: float = 0.1,
    *,
    draw: float = 0.5,
    now: float = 0.0,
    scheduling: Scheduling = ONE,
    most_s: float = MOST_S,
) -> float:
    return returns.told_s(
        key, scheduling, work_s, room_in_s=ROOM_S, draw=draw, now=now, most_s=most_s
    )


def test_a_wait_is_the_estimate_times_a_factor_within_its_bounds() -> None:
    waits = [told(Returns(CONFIG), 1, 0.5, draw=draw) for draw in (0.0, 0.5, 1.0)]
    done_s = ROOM_S + 0.5
    assert waits[0] == pytest.approx(CONFIG.retry_jitter_least * done_s)
    assert waits[2] == pytest.approx(CONFIG.retry_jitter_most * done_s)
    assert waits[0] < waits[1] < waits[2]


def test_refused_requests_are_told_times_one_after_another_below_the_measured_rate() -> None:
    returns = Returns(EXACT)
    waits = [told(returns, key) for key in range(1, 101)]
    gaps = [later - sooner for sooner, later in pairwise(waits)]
    assert gaps == pytest.approx([0.1 / CONFIG.return_rate_share] * 99)


def test_a_tenants_flood_is_its_own_schedule_and_critical_requests_are_behind_none() -> None:
    returns = Returns(EXACT)
    for key in range(1, 1001):
        told(returns, key)
    assert told(returns, 2000) > 100.0
    for key, scheduling in ((2001, OTHER), (2002, CRITICAL)):
        assert told(returns, key, scheduling=scheduling) == pytest.approx(ROOM_S + 0.1)


def test_tenants_with_refused_requests_share_the_rate_by_weight() -> None:
    returns = Returns(EXACT)
    for scheduling in (ONE, HEAVY):
        for key in range(1, 101):
            told(returns, hash((scheduling.tenant, key)), scheduling=scheduling)
    waits = [
        told(returns, hash((scheduling.tenant, key)), scheduling=scheduling)
        for scheduling in (ONE, HEAVY)
        for key in (200, 201)
    ]
    gap_s = 0.1 / CONFIG.return_rate_share
    assert waits[1] - waits[0] == pytest.approx(4 * gap_s)
    assert waits[3] - waits[2] == pytest.approx(gap_s * 4 / 3)


def test_a_request_that_comes_early_keeps_its_time_and_is_known_only_then() -> None:
    returns = Returns(CONFIG)
    due = told(returns, 1, draw=1.0)
    assert told(returns, 1, draw=0.0, now=1.0) == pytest.approx(due - 1.0)
    assert not returns.is_due(1, 1.0)
    assert returns.is_due(1, due)
    assert returns.is_due(1, due + GRACE_S - 0.1)
    assert not returns.is_due(1, due + GRACE_S + 0.1)
    returns.came(1, due)
    assert not returns.is_due(1, due)
    assert (len(returns), returns.shown_share) == (0, 1.0)


def test_requests_that_do_not_return_are_forgotten_and_the_next_are_told_less() -> None:
    returns = Returns(EXACT)
    for key in range(1, 201):
        told(returns, key)
    returns.forget(1000.0)
    assert len(returns) == 0
    assert returns.shown_share < 0.01
    assert told(returns, 300, now=1000.0) == pytest.approx(ROOM_S + 0.1)
    told(returns, 301, 10.0, now=1000.0)
    assert told(returns, 302, now=1000.0) < ROOM_S + 1.0


def test_requests_that_are_not_remembered_move_no_other() -> None:
    returns = Returns(EXACT)
    for _ in range(100):
        told(returns, 0, 10.0)
    assert (len(returns), told(returns, 1)) == (0, pytest.approx(ROOM_S + 0.1))
    full = Returns(AdmissionConfig(max_expected_returns=4))
    for key in range(1, 101):
        told(full, key, 10.0)
    assert len(full) == 2, "the remaining ones"
    told(full, 150, 10.0, scheduling=OTHER)
    assert len(full) == 3
    assert told(full, 200, 0.0) <= CONFIG.retry_jitter_most * (ROOM_S + 25.0)


def test_beyond_the_longest_time_requests_are_told_apart_and_not_remembered() -> None:
    returns = Returns(CONFIG)
    waits = [told(returns, n, 5.0, most_s=PATIENCE_S, draw=n % 11 / 10) for n in range(1, 1001)]
    assert max(waits) <= PATIENCE_S
    assert len({round(wait, 9) for wait in waits[-11:]}) == 11
    assert len(returns) < 20


def refusing() -> Overload:
    slo = SloConfig(2.0, 2.0, 2.0)
    one = Overload(OverloadConfig(slo, EXACT), OverloadObserver(), 0.0)
    one.prediction.see(FleetCapacity(64, RATE, RATE))
    return one


def told_by(one: Overload, demand: Demand, tokens_ahead: float, now: float = 0.0) -> float:
    with pytest.raises(RequestError) as refusal:
        one.judge(demand, tokens_ahead, now)
    assert refusal.value.retry_after_s is not None
    return refusal.value.retry_after_s


def test_before_the_rate_is_known_the_time_is_left_to_be_spread() -> None:
    one = Overload(OverloadConfig(), OverloadObserver(), 0.0)
    one.brownout.level = Level.CRITICAL_ONLY
    with pytest.raises(RequestError) as refusal:
        one.judge(Demand(ONE, 50, 600.0, 1), 0.0, 0.0)
    assert (refusal.value.retry_after_s, refusal.value.is_spread) == (1.0, False)
    assert len(one.returns) == 0


def test_a_request_that_could_never_be_in_time_moves_no_other() -> None:
    calm, lied_to = refusing(), refusing()
    told_by(lied_to, Demand(ONE, 300_000, 0.01, 1), 50_000.0)
    demand = Demand(OTHER, 50, 600.0, 2)
    assert told_by(lied_to, demand, 50_000.0) == told_by(calm, demand, 50_000.0)


def test_a_flood_moves_neither_tenants_below_their_share_nor_critical_requests() -> None:
    calm, flooded = refusing(), refusing()
    for key in range(1, 1000):
        told_by(flooded, Demand(ONE, 5000, 600.0, key), 50_000.0)
    for demand in (
        Demand(OTHER, 50, 600.0, 1000, is_under_share=True),
        Demand(CRITICAL, 50, 600.0, 1001),
    ):
        assert told_by(flooded, demand, 50_000.0) == told_by(calm, demand, 50_000.0)


def test_in_brownout_no_request_is_told_more_than_official_clients_bear() -> None:
    one = refusing()
    one.brownout.level = Level.CRITICAL_ONLY
    waits = [told_by(one, Demand(ONE, 5000, 600.0, key), 50_000.0) for key in range(1, 1000)]
    assert max(waits) <= PATIENCE_S


def test_newcomers_leave_room_for_expected_requests_and_critical_ones_do_not() -> None:
    one = refusing()
    ahead = 1.2 * RATE  # between a new request's limit with and without expected returns
    assert one.judge(Demand(OTHER, 50, 600.0, 9), ahead, 0.0)
    due = told_by(one, Demand(ONE, 50, 600.0, 1), 50_000.0)
    assert one.judge(Demand(OTHER, 50, 600.0, 2), ahead, 0.0), "over before the return is due"
    told_by(one, Demand(OTHER, 50, 600.0, 4), ahead, due - 1.0)
    assert one.judge(Demand(CRITICAL, 50, 600.0, 3), ahead, due - 1.0)
    assert one.judge(Demand(ONE, 50, 600.0, 1), ahead, due)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"new_request_share": 0.9}, "new_request_share"),
        ({"return_rate_share": 1.1}, "return_rate_share"),
        ({"retry_jitter_least": 1.4}, "retry_jitter_least"),
        ({"retry_jitter_least": 0.0}, "retry_jitter_least"),
    ],
)
def test_shares_and_factors_out_of_range_are_named(config: dict[str, float], name: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.convert(config, AdmissionConfig)
