"""Tests of the statistics of overload runs: goodput, refusals, wasted prefill, fairness and
recovery."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.overload.arrivals import Arrival
from loadtest.overload.outcomes import (
    Fate,
    Outcome,
    figures,
    in_slo,
    jain,
    percentile,
    recovery_s,
    taken_at_return,
    tokens_by_tenant,
    wasted,
    within,
)

ASKED = Arrival(0.0, 50, 10, slo_s=2.0, deadline_s=8.0)


def whole(at_s: float = 0.0, first_s: float = 0.1, tenant: str = "") -> Outcome:
    arrival = replace(ASKED, at_s=at_s, tenant=tenant)
    return Outcome(arrival, Fate.WHOLE, first_s=first_s, end_s=first_s + 1.0, tokens=10)


def refused(at_s: float = 0.0) -> Outcome:
    arrival = replace(ASKED, at_s=at_s)
    return Outcome(arrival, Fate.REFUSED, end_s=0.004, code="overloaded", retry_after_s=3.0)


def test_an_answer_is_of_use_only_if_its_first_token_and_its_end_came_in_time() -> None:
    assert whole().is_good
    assert not whole(first_s=2.1).is_good
    assert not replace(whole(), end_s=8.1).is_good
    assert not replace(whole(), fate=Fate.FAILED).is_good
    assert replace(whole(), fate=Fate.CAPPED, tokens=5).is_good


def test_goodput_counts_what_was_of_use_and_refusals_are_no_failures() -> None:
    failed = Outcome(ASKED, Fate.FAILED, end_s=9.0, code="request_timeout")
    found = figures([whole(), whole(first_s=3.0), refused(), failed], seconds=2.0)
    assert (found.offered, found.good, found.goodput, found.token_goodput) == (4, 1, 0.5, 5.0)
    assert (found.refused, found.failed) == (0.25, 0.25)
    # A request that got no token counts with the time until its end.
    assert found.ttft_p99_s == 9.0
    assert found.ttft_over_slo == 4.5
    assert found.refusal_p99_s == 0.004


def test_who_is_dropped_is_neither_refused_nor_late() -> None:
    dropped = replace(refused(), fate=Fate.DROPPED, end_s=2.5)
    found = figures([whole(), dropped], seconds=1.0)
    assert (found.refused, found.dropped, found.failed) == (0.0, 0.5, 0.0)
    assert figures([whole(), dropped, refused(), refused()], 1.0).dropped_of_accepted == 0.5
    assert figures([refused()], 1.0).dropped_of_accepted == 0.0
    assert found.refusal_p99_s is None
    assert found.ttft_p99_s == 0.1


def test_nothing_makes_no_figures() -> None:
    found = figures([], seconds=1.0)
    assert found.ttft_p50_s is None
    assert found.refusal_p99_s is None
    assert in_slo([]) == 1.0
    assert taken_at_return([]) is None


def test_prefill_is_wasted_where_nothing_was_decoded() -> None:
    first_only = Outcome(ASKED, Fate.FAILED, first_s=0.5, end_s=8.0, tokens=1)
    assert wasted([whole(), whole(), refused()], computed_tokens=100) == 0.0
    assert wasted([whole(), first_only], computed_tokens=100) == 0.5
    came_again = refused()
    came_again.again = whole()
    assert wasted([whole(), came_again], computed_tokens=100) == 0.0
    assert wasted([], computed_tokens=0) == 0.0


def test_those_who_came_within_a_time_are_found() -> None:
    outcomes = [whole(at_s) for at_s in (0.0, 1.0, 2.0)]
    assert within(outcomes, 1.0, 2.0) == outcomes[1:2]


def test_tenants_got_the_tokens_that_were_of_use_to_them() -> None:
    outcomes = [whole(tenant="a"), whole(tenant="a"), replace(refused(), arrival=ASKED)]
    assert tokens_by_tenant(outcomes) == {"a": 120, "": 0}


@pytest.mark.parametrize(
    ("shares", "index"), [([1, 1, 1, 1], 1.0), ([1, 0, 0, 0], 0.25), ([0, 0], 1.0)]
)
def test_jains_index(shares: list[float], index: float) -> None:
    assert jain(shares) == pytest.approx(index)


def test_a_fleet_has_recovered_after_three_normal_seconds_in_a_row() -> None:
    slow = [whole(at_s=10.0 + at / 2, first_s=3.0) for at in range(4)]
    good = [whole(at_s=12.0 + at / 2) for at in range(6)]
    hiccup = [whole(at_s=13.2, first_s=9.0), whole(at_s=13.4, first_s=9.0)]
    later = [whole(at_s=15.5), whole(at_s=16.5)]
    assert recovery_s(slow + good, ended_s=10.0, normal_s=0.2) == 3.0
    assert recovery_s(slow + good + hiccup[:1], ended_s=10.0, normal_s=0.2) == 3.0
    assert recovery_s(slow + good + [*hiccup, whole(13.5, 9.0)], 10.0, 0.2) is None
    assert recovery_s(slow + good + [*hiccup, whole(13.5, 9.0), *later], 10.0, 0.2) == 5.0
    assert recovery_s(slow + good + [whole(at_s=15.5, first_s=9.0)], 10.0, 0.2) == 3.0
    assert recovery_s(slow, ended_s=10.0, normal_s=0.2) is None


def test_a_second_in_which_nobody_was_taken_is_not_normal() -> None:
    outcomes = [
        whole(at_s=10.0),
        refused(at_s=11.0),
        *(whole(at_s=at) for at in (12.0, 13.0, 14.0)),
    ]
    assert recovery_s(outcomes, ended_s=10.0, normal_s=0.2) == 3.0


def test_whoever_comes_back_is_taken_or_not() -> None:
    first, second = refused(), refused()
    first.again, second.again = whole(at_s=3.0), refused(at_s=3.0)
    assert taken_at_return([first, second, whole(), refused()]) == 0.5


def test_a_percentile_is_a_value_that_was_there() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.99) == 99.0
    assert percentile(values, 1.0) == 100.0
    assert percentile([5.0], 0.01) == 5.0
    assert percentile([], 0.5) is None
