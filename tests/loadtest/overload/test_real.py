"""Tests of an open-loop overload run against real processes with modelled devices. They check
counts, not times."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from loadtest.overload.arrivals import Arrival, Sizes, poisson, requests
from loadtest.overload.lab_process import NOTHING
from loadtest.overload.outcomes import Fate, figures
from loadtest.overload.real import RealLoad, RealShape, drive, real_fleet
from tests import forked

if TYPE_CHECKING:
    from pathlib import Path

PATIENT = Arrival(0.0, 1, 1, slo_s=120.0, deadline_s=120.0)


@pytest.mark.long
@pytest.mark.slow
async def test_everybody_who_comes_has_an_end_and_nothing_is_left(tmp_path: Path) -> None:
    numbers = random.Random(1)
    arrivals = requests(poisson(numbers, 20.0, 2.0), numbers, PATIENT, Sizes(prompt=16, output=8))
    with real_fleet(RealShape(mechanisms=NOTHING), tmp_path, forked.Popen) as fleet:
        course = await drive(fleet, RealLoad(arrivals))
    assert not course.left
    assert len(course.outcomes) == len(arrivals)
    for outcome in course.outcomes:
        assert outcome.fate is Fate.WHOLE, outcome
        assert outcome.tokens == outcome.arrival.output_tokens
        assert outcome.first_s is not None
        assert outcome.late_s <= outcome.first_s <= outcome.end_s
    assert figures(course.outcomes, 1.0).good == len(arrivals)
    # No two prompts share a prefix. On a slow machine a retried prompt is computed more than once.
    assert course.prompt_tokens >= sum(arrival.prompt_tokens for arrival in arrivals)
