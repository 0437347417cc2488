"""Tests of admission under overload in virtual time. Each run is deterministic, so results are
checked exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.overload import plan
from loadtest.overload.__main__ import panels
from loadtest.overload.arrivals import merged
from loadtest.overload.goals import counted, draw, ratios, row
from loadtest.overload.lab import Result, in_virtual_time
from loadtest.overload.lab_process import ALL, EVERYTHING, NOTHING, configured
from loadtest.overload.outcomes import Fate, figures, taken_at_return
from loadtest.overload.virtual import VirtualLoad, drive
from simulation.fleet import FleetShape
from simulation.modelled import COST, StepCost
from triolet.service_class import ServiceClass

CAPACITY = 7.25
"""Requests per second that the lab's fleet can serve, as measured by `make overload`."""
TIMES = plan.Times(warm_s=4.0, counted_s=8.0, surge_s=5.0, calm_s=5.0)
BRIEF = plan.Times(warm_s=3.0, counted_s=5.0, surge_s=4.0, calm_s=4.0)


def measured(loads: tuple[float, ...], names: tuple[str, ...]) -> list[Result]:
    return in_virtual_time(plan.curve(CAPACITY, TIMES, loads, names), num_processes=0)


def test_at_half_load_everybody_is_answered_in_time_and_nothing_is_left() -> None:
    [result] = measured((0.5,), (EVERYTHING,))
    assert {outcome.fate for outcome in result.course.outcomes} == {Fate.WHOLE}
    assert all(outcome.is_good for outcome in result.course.outcomes)
    assert not result.course.left
    asked = sum(o.arrival.prompt_tokens for o in result.course.outcomes)
    assert result.course.prompt_tokens == asked


@pytest.mark.slow
def test_at_twice_the_load_admission_keeps_what_is_lost_without_it() -> None:
    with_all, without = measured((2.0,), (EVERYTHING, NOTHING))
    kept = figures(counted(with_all), TIMES.counted_s)
    lost = figures(counted(without), TIMES.counted_s)
    assert kept.goodput >= 0.85 * CAPACITY
    assert lost.goodput <= 0.5 * kept.goodput
    assert kept.failed == 0.0
    assert kept.ttft_over_slo is not None
    assert kept.ttft_over_slo <= 1.25
    assert row(with_all)["critical_in_slo"] == 1.0
    assert row(with_all)["wasted_prefill"] <= 0.02
    assert not with_all.course.left
    assert not without.course.left
    picture = draw(panels([row(with_all), row(without)]))
    assert EVERYTHING in picture
    assert NOTHING in picture


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize(
    ("cost", "rows", "capacity"),
    [(COST, 32, CAPACITY), (StepCost(0.010, 0.002, 0.0002), 6, 11.0)],
    ids=["bound by prefill", "bound by rows"],
)
def test_who_comes_back_when_told_to_is_taken(
    cost: StepCost, rows: int, capacity: float, whole: bool
) -> None:
    seconds = 20.0 if whole else 10.0
    shape = FleetShape(cost=cost, max_num_seqs=rows)
    shape = replace(shape, server=configured(shape.server, EVERYTHING))
    arrivals = plan.steady(capacity, 2.0, seconds, seed=1)
    course = drive(shape, VirtualLoad(arrivals, do_return=True))
    assert sum(outcome.again is not None for outcome in course.outcomes) > 5 * seconds
    share = taken_at_return(course.outcomes)
    assert share is not None
    assert share >= 0.8
    assert not course.left


@pytest.mark.slow
def test_who_comes_back_when_told_to_is_taken_also_beside_a_flood() -> None:
    shape = FleetShape()
    shape = replace(shape, server=configured(shape.server, EVERYTHING))
    # All requests have one class. In a run this short, the arrival times of a few critical requests
    # would determine the result of the others.
    streams = (
        [
            replace(one, tenant=name, service_class=ServiceClass.DEFAULT)
            for one in plan.steady(load * CAPACITY, 1.0, 10.0, seed=6)
        ]
        for name, load in (("flood", 4.0), ("other", 1.0))
    )
    course = drive(shape, VirtualLoad(merged(*streams), do_return=True))
    others = [outcome for outcome in course.outcomes if outcome.arrival.tenant == "other"]
    assert sum(outcome.again is not None for outcome in others) > 10
    share = taken_at_return(others)
    assert share is not None
    assert share >= 0.9
    longest_s = dict.fromkeys(("flood", "other"), 0.0)
    for outcome in course.outcomes:
        name, wait_s = outcome.arrival.tenant, outcome.retry_after_s or 0.0
        longest_s[name] = max(longest_s[name], wait_s)
    assert longest_s["other"] <= 0.5 * longest_s["flood"]


@pytest.mark.slow
@pytest.mark.proof
def test_a_fleet_is_back_to_normal_within_seconds_of_a_surge(whole: bool) -> None:
    # The calm phase is longer than the five seconds in which a fleet must recover.
    times = plan.Times(surge_s=10.0, calm_s=12.0) if whole else plan.Times(surge_s=6.0, calm_s=8.0)
    with_all = [one for one in plan.surge(CAPACITY, times) if one.mechanisms == EVERYTHING]
    results = in_virtual_time(with_all, num_processes=0)
    assert all(ratio.is_met for ratio in ratios(results).values())


@pytest.mark.slow
def test_weights_are_the_shares_that_tenants_get() -> None:
    [weighted] = [one for one in plan.tenants(CAPACITY, TIMES) if one.case == "weights 1:2:4"]
    [result] = in_virtual_time([weighted], num_processes=0)
    [(name, ratio)] = [(name, ratio) for name, ratio in ratios([result]).items() if "share" in name]
    # In eight seconds a tenant has so few requests that one is several per cent of its share.
    assert ratio.value <= 0.25, name


@pytest.mark.slow
@pytest.mark.proof
def test_who_asks_for_little_is_served_beside_a_flood_as_if_it_were_hardly_there(
    whole: bool,
) -> None:
    cases = [
        one
        for one in plan.tenants(CAPACITY, TIMES if whole else BRIEF)
        if one.mechanisms == EVERYTHING and one.case.startswith("b ")
    ]
    found = ratios(in_virtual_time(cases, num_processes=0))
    assert found["tenant b's requests not answered beside a flood"].value == 0.0
    # Without the head start in the fair queue it would be 2.4, and some requests would be refused.
    # With so few requests, the p99 is that of the slowest.
    assert found["tenant b's p99 TTFT beside a flood, over alone"].value <= 2.0


def test_every_mechanism_can_be_switched_off_by_itself() -> None:
    config = FleetShape().server
    switched = {
        name: (
            made.queue.fair,
            made.overload.admission.is_on,
            made.overload.brownout.is_on,
            made.overload.guard.is_on,
        )
        for name in ALL
        for made in [configured(config, name)]
    }
    assert len(set(switched.values())) == len(ALL)
    assert all(switched[EVERYTHING])
    assert not any(switched[NOTHING])
    assert all(sum(switched[name]) == 3 for name in ALL[1:-1])
