"""Tests of generated arrivals for overload runs: rate, burstiness, lengths and classes are as
requested and depend only on the seed."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from loadtest.overload.arrivals import (
    Arrival,
    Sizes,
    bursty,
    in_classes,
    merged,
    on_off,
    poisson,
    requests,
    shifted,
)
from triolet.service_class import ServiceClass

LIKE = Arrival(0.0, 1, 1)


def gaps_of(moments: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(moments)]


@pytest.mark.parametrize("cv", [1.0, 3.0])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(cv: float) -> None:
    gaps = gaps_of(list(bursty(random.Random(1), 10.0, 5000.0, cv)))
    assert fmean(gaps) == pytest.approx(0.1, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.05)


def test_nobody_comes_while_it_is_off() -> None:
    moments = list(on_off(random.Random(1), 5.0, 1000.0, period_s=20.0, share=0.25))
    assert len(moments) == pytest.approx(5000, rel=0.05)
    assert moments == sorted(moments)
    assert all(at_s % 20.0 < 5.0 for at_s in moments)


def test_a_seed_decides_everything() -> None:
    def drawn() -> list[Arrival]:
        numbers = random.Random(7)
        return requests(poisson(numbers, 20.0, 5.0), numbers, LIKE, Sizes())

    assert drawn() == drawn()


def test_lengths_have_the_median_that_was_asked_for_and_stay_within_bounds() -> None:
    numbers, sizes = random.Random(1), Sizes(prompt=48, output=20, spread=0.8, most=100)
    drawn = [sizes.draw(numbers) for _ in range(4001)]
    prompts, outputs = (sorted(lengths) for lengths in zip(*drawn, strict=True))
    assert prompts[2000] == pytest.approx(48, rel=0.1)
    assert outputs[2000] == pytest.approx(20, rel=0.1)
    assert prompts[0] >= 4
    assert outputs[0] >= 2
    assert prompts[-1] == 100


def test_classes_come_in_the_shares_that_were_asked_for_with_what_each_was_promised() -> None:
    plain = [LIKE] * 3000
    shares = ((ServiceClass.CRITICAL, 1.0), (ServiceClass.BATCH, 2.0))
    classed = in_classes(plain, shares, random.Random(1), lambda which: 10.0 + which)
    critical = [a for a in classed if a.service_class is ServiceClass.CRITICAL]
    assert len(critical) == pytest.approx(1000, rel=0.1)
    assert {(a.service_class, a.slo_s) for a in classed} == {
        (ServiceClass.CRITICAL, 10.0),
        (ServiceClass.BATCH, 13.0),
    }


def test_streams_are_put_in_the_order_in_which_they_come() -> None:
    early, late = [Arrival(1.0, 1, 2), Arrival(3.0, 1, 2)], [Arrival(0.0, 2, 2)]
    assert [a.at_s for a in merged(early, shifted(late, 2.0))] == [1.0, 2.0, 3.0]
