"""Tests that after all workers of a zone or host were paused for longer than a lease, no token is
delivered twice and no block is lost. Production code in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from simulation import scenario
from simulation.campaign import keep_quiet
from simulation.faults import Fault, ZoneLoss

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

SEEDS = (15, 22)
"""Seeds in which the loss of a zone stops two running workers."""
SILENT_S = 3.0
"""Longer than `link.lease_ttl_s`."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "apart_s",
    [pytest.param(0.0, id="at once"), pytest.param(1.5, id="in waves")],
)
def test_a_zone_that_stood_still_goes_on_and_nothing_comes_twice(
    apart_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes over a second: simulates two seeds."""
    keep_quiet()

    def stopped(rng: random.Random, zones: Sequence[str]) -> ZoneLoss:
        return ZoneLoss(rng.choice(zones), rng.uniform(0.5, 3.0), SILENT_S, apart_s, is_death=False)

    monkeypatch.setattr(scenario, "draw_zone_loss", stopped)
    for seed in SEEDS:
        report = scenario.simulate(seed)
        assert report.tally.happened[Fault.ZONE] == 2, "two workers of the zone were stopped"
        assert report.violations == []
