"""Tests of simulation campaigns: the totals over many runs, and the output of the commands."""

from __future__ import annotations

from collections import Counter

import pytest

from simulation import __main__ as command
from simulation.campaign import ENOUGH_SEEDS, Campaign, keep_quiet
from simulation.cancels import MAX_GROWTH, Cancels, leave
from simulation.faults import Fault, Tally
from simulation.scenario import Report


def campaign_of(num_seeds: int, *, happened: int) -> Campaign:
    campaign = Campaign()
    for seed in range(num_seeds):
        tally = Tally(asked=Counter({Fault.CRASH: 1}), happened=Counter({Fault.CRASH: happened}))
        campaign.add(Report(seed, tally=tally))
    return campaign


def test_a_fault_that_was_asked_for_and_never_came_is_an_error() -> None:
    assert campaign_of(ENOUGH_SEEDS, happened=1).is_good
    campaign = campaign_of(ENOUGH_SEEDS, happened=0)
    assert campaign.missing == [Fault.CRASH]
    assert not campaign.is_good


def test_a_few_seeds_need_not_meet_every_fault() -> None:
    assert campaign_of(ENOUGH_SEEDS - 1, happened=0).is_good


def test_one_violation_spoils_a_campaign() -> None:
    campaign = campaign_of(ENOUGH_SEEDS, happened=1)
    campaign.add(Report(99, violations=["a block was lost"]))
    assert not campaign.is_good
    assert [report.seed for report in campaign.failed] == [99]


@pytest.mark.slow
def test_the_command_runs_seeds_and_replays_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seeds", "2", "--processes", "1"]) == 0
    assert "2 seeds in" in capsys.readouterr().out
    assert command.main(["--replay", "1", "--story"]) == 0
    story = capsys.readouterr().out
    assert "everything is healed" in story
    assert "seed 1: trace" in story


def test_memory_that_grows_is_told_apart() -> None:
    assert Cancels(rss_bytes=[100, 101, 102]).growth <= MAX_GROWTH
    assert Cancels(rss_bytes=[100, 110, 120]).growth > MAX_GROWTH


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.proof
def test_cancels_and_deadlines_leave_nothing_behind(whole: bool) -> None:
    keep_quiet()
    count = 1000 if whole else 120
    result = leave(seed=8, count=count)
    assert result.violations == []
    assert result.phases.total() >= count
    phases = {"queued", "prefilling", "decoding"}
    deadlines = {f"{phase} at its deadline" for phase in phases}
    assert phases | deadlines <= set(result.phases)
    assert len(result.free_s) == result.phases.total()
    assert max(result.free_s) <= 0.1
