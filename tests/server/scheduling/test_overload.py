"""Tests of admission, brownout and guard on simulated fleets with an open loop of clients."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.scheduling.overload import Brownout, Level
from triolet.config import (
    AdmissionConfig,
    BrownoutConfig,
    GuardConfig,
    OverloadConfig,
    SloConfig,
)
from triolet.service_class import ServiceClass

from .overload_sim import FleetSim

SLO = SloConfig(critical_s=2.0, default_s=2.0, sheddable_s=2.0)
ON = OverloadConfig(slo=SLO)
OFF = OverloadConfig(
    SLO, AdmissionConfig(is_on=False), BrownoutConfig(is_on=False), GuardConfig(is_on=False)
)
BOUND_BY = {"prefill": (64, 4000.0), "rows": (16, 20_000.0)}
SECONDS = 30.0
C = ServiceClass


def fleet(
    config: OverloadConfig, bound_by: str, comes_back: float = 0.0, *, is_rounding: bool = False
) -> FleetSim:
    rows, tokens_per_s = BOUND_BY[bound_by]
    return FleetSim(
        config,
        rows=rows,
        tokens_per_s=tokens_per_s,
        comes_back=comes_back,
        is_rounding=is_rounding,
    )


def goodput(config: OverloadConfig, bound_by: str, load: float) -> float:
    """Return first tokens in time per second."""
    sim = fleet(config, bound_by)
    sim.offer(load, SECONDS)
    sim.run(SECONDS)
    return sum(sim.finish().good.values()) / SECONDS


@pytest.mark.parametrize("bound_by", BOUND_BY)
def test_goodput_under_overload_stays_what_it_was(bound_by: str) -> None:
    at_once = goodput(ON, bound_by, 1.0)
    assert goodput(ON, bound_by, 2.0) >= 0.85 * at_once
    assert goodput(ON, bound_by, 4.0) >= 0.8 * at_once


@pytest.mark.parametrize("bound_by", BOUND_BY)
def test_without_admission_hardly_anything_is_in_time(bound_by: str) -> None:
    assert goodput(OFF, bound_by, 2.0) < 0.3 * goodput(ON, bound_by, 1.0)


@pytest.mark.parametrize("bound_by", BOUND_BY)
def test_what_is_taken_on_is_in_time(bound_by: str) -> None:
    sim = fleet(ON, bound_by)
    sim.offer(4.0, SECONDS)
    sim.run(SECONDS)
    report = sim.finish()
    assert report.late_share(1.25 * SLO.default_s) <= 0.01
    assert report.dropped <= 0.1 * len(report.ttfts)


@pytest.mark.parametrize("bound_by", BOUND_BY)
def test_every_critical_request_is_in_time(bound_by: str) -> None:
    sim = fleet(ON, bound_by)
    sim.offer(2.0, SECONDS, {C.CRITICAL: 0.25, C.DEFAULT: 0.5, C.SHEDDABLE: 0.25})
    sim.run(SECONDS)
    report = sim.finish()
    assert report.good[C.CRITICAL] >= 0.99 * report.offered[C.CRITICAL]
    assert report.good[C.DEFAULT] > report.good[C.SHEDDABLE]


@pytest.mark.parametrize("bound_by", BOUND_BY)
@pytest.mark.parametrize("comes_back", [0.5, 1.0])
@pytest.mark.parametrize("is_rounding", [False, True])
def test_clients_that_wait_as_told_are_let_in(
    bound_by: str, comes_back: float, *, is_rounding: bool
) -> None:
    sim = fleet(ON, bound_by, comes_back, is_rounding=is_rounding)
    sim.offer(1.5, SECONDS)
    sim.run(SECONDS)
    report = sim.finish()
    assert report.returned > 50
    assert report.returned_in >= 0.9 * report.returned


def test_a_fleet_is_back_to_normal_within_seconds() -> None:
    sim = fleet(ON, "prefill")
    sim.offer(3.0, SECONDS)
    sim.run(SECONDS)
    sim.offer(0.5, 10.0)
    report = sim.run(10.0)
    assert max(level for at, level in report.levels if at < SECONDS) >= 3
    back_at = min(at for at, level in report.levels if at > SECONDS and level == 0)
    assert back_at <= SECONDS + 5.0
    assert max(level for at, level in report.levels if at > back_at) <= 2


def test_half_of_the_workers_going_makes_nobody_late_for_long() -> None:
    sim = fleet(ON, "rows")
    sim.offer(1.5, SECONDS)
    sim.run(SECONDS / 2)
    sim.rows //= 2
    sim.run(3.0)
    lost = len(sim.report.ttfts)
    sim.run(SECONDS / 2 - 3.0)
    report = sim.finish()
    after = report.ttfts[lost:]
    assert sum(ttft > 1.25 * SLO.default_s for ttft in after) <= 0.02 * len(after)


def test_everything_returns_to_zero() -> None:
    sim = fleet(ON, "rows", comes_back=0.5)
    sim.offer(4.0, 10.0)
    sim.run(10.0)
    sim.finish()
    overload = sim.overload
    overload.returns.forget(1e9)
    assert len(overload.returns) == 0
    assert all(overload.outstanding.owed(one) == 0 for one in C)
    assert overload.outstanding.running == 0
    assert overload.status(sim.now).owed_tokens == 0


def test_predictions_that_are_wrong_are_bounded_by_the_guard() -> None:
    # Only the effect shows it.
    lying = replace(ON, admission=AdmissionConfig(is_on=False))
    ends = {}
    for is_on in (False, True):
        config = replace(
            lying, guard=GuardConfig(is_on=is_on), brownout=BrownoutConfig(is_on=False)
        )
        sim = fleet(config, "prefill")
        sim.offer(2.0, SECONDS)
        sim.run(SECONDS)
        ends[is_on] = sum(sim.finish().good.values())
    assert ends[True] > 3 * ends[False]


def test_a_level_rises_and_falls_one_at_a_time_and_only_after_its_pressure_lasted() -> None:
    config = BrownoutConfig()
    ladder = Brownout(config, 0.0)
    changes: list[tuple[float, int]] = []
    for tick in range(400):
        now = tick * 0.05
        pressure = 1.0 if now < 10.0 else 0.0
        if ladder.advance(pressure, 0.0, now):
            changes.append((now, int(ladder.level)))
    assert [level for _, level in changes] == [1, 2, 3, 2, 1, 0]
    rises = [at for at, _ in changes[:3]]
    assert all(b - a >= config.rise_after_s - 1e-9 for a, b in pairwise([0.0, *rises]))


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 3.0)), max_size=200))
def test_no_level_flickers_whatever_the_pressure(pressures: list[tuple[float, float]]) -> None:
    config = BrownoutConfig()
    ladder = Brownout(config, 0.0)
    changed_at, level = 0.0, 0
    for tick, (pressure, critical) in enumerate(pressures, 1):
        now = tick * 0.05
        if ladder.advance(pressure, critical, now):
            assert abs(int(ladder.level) - level) == 1
            least_s = min(config.rise_after_s, config.fall_after_s)
            assert now - changed_at >= least_s - 1e-9
            changed_at, level = now, int(ladder.level)
        assert int(ladder.level) == level


def test_long_prompts_of_who_asks_for_little_are_not_what_is_too_much() -> None:
    ladder = Brownout(BrownoutConfig(), 0.0)
    long = BrownoutConfig().long_prompt_tokens + 1
    ladder.level = Level.CAP_DEFAULT
    assert ladder.refuses(C.DEFAULT, long)
    assert not ladder.refuses(C.DEFAULT, long, is_under_share=True)
    ladder.level = Level.CRITICAL_ONLY
    assert ladder.refuses(C.DEFAULT, 1, is_under_share=True)


def test_without_brownout_nothing_is_ever_given_up() -> None:
    ladder = Brownout(BrownoutConfig(is_on=False), 0.0)
    for tick in range(200):
        assert not ladder.advance(9.0, 9.0, tick * 0.1)
    assert ladder.max_tokens(C.SHEDDABLE) is None
