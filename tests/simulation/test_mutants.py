"""Tests that the simulator detects a product with a guard removed: the short version of `make
simulate-mutants`."""

from __future__ import annotations

import pytest

from simulation.campaign import keep_quiet, run_campaign
from simulation.guards import GUARDS, without
from simulation.mutants import MUTANTS, Mutant, hunt
from simulation.scenario import simulate

QUICKLY_CAUGHT = 60
"""The tests run the mutants that must be caught within at most this many seeds."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant", [mutant for mutant in MUTANTS if mutant.within <= QUICKLY_CAUGHT], ids=str
)
@pytest.mark.long
def test_a_product_without_a_guard_is_caught(mutant: Mutant) -> None:
    keep_quiet()
    verdict = hunt(mutant)
    assert verdict.seed is not None, f"{mutant} survived {mutant.within} seeds"


@pytest.mark.slow
def test_guards_are_back_after_the_hunt() -> None:
    keep_quiet()
    healthy = simulate(0)
    with without(*GUARDS):
        broken = simulate(0)
    assert healthy.violations == []
    assert broken.violations
    assert simulate(0).trace == healthy.trace != broken.trace


def test_every_guard_is_taken_away_by_some_mutant() -> None:
    assert {name for mutant in MUTANTS for name in mutant.removed} == set(GUARDS)


@pytest.mark.slow
def test_a_campaign_names_the_seeds_that_failed() -> None:
    keep_quiet()
    with without("positions"):
        campaign = run_campaign(range(2), 1, lambda _: None)
    assert [report.seed for report in campaign.failed] == [0]
    assert not campaign.is_good
