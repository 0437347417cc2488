"""Tests of simulated rollouts: the short form of `make simulate-rollouts`, and that a campaign
notices what is wrong."""

from __future__ import annotations

import pytest

from loadtest.rollouts import __main__ as command
from loadtest.rollouts.campaign import RolloutEnd, roll_out
from loadtest.rollouts.expectations import (
    EQUAL,
    EVENTS,
    FLEETS,
    WORSE,
    Expectation,
    Summary,
    judged,
)
from loadtest.rollouts.traffic import Scenario

EQUAL_RUNS = 3
WORSE_RUNS = 5
MAX_BAKE_S = 60.0
"""Longest step of a rollout here; the whole campaign has longer ones."""


@pytest.mark.slow
@pytest.mark.parametrize("expected", EQUAL, ids=lambda one: one.scenario.name)
def test_equal_versions_are_not_rolled_back(expected: Expectation) -> None:
    runs = 1 if expected.scenario.rate > 20.0 else EQUAL_RUNS
    ends = [expected.roll_out(seed) for seed in range(runs)]
    assert {end.action for end in ends} <= {"promoted", "pause"}, [end.said for end in ends]
    assert "promoted" in {end.action for end in ends}
    assert Summary(expected, tuple(ends)).failures == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "expected",
    [one for one in WORSE if one.scenario.bake_s <= MAX_BAKE_S],
    ids=lambda one: one.scenario.name,
)
def test_worse_versions_are_found(expected: Expectation) -> None:
    ends = [expected.roll_out(seed) for seed in range(WORSE_RUNS)]
    summary = Summary(expected, tuple(ends))
    assert len(summary.right) >= WORSE_RUNS - 1, [(end.action, end.said) for end in ends]
    assert not any(end.violations for end in ends)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reasons"),
    [
        ("fleet: errors 1 to 90 %", {"guard errors", "fast errors"}),
        ("fleet: prompts 5 times as slow", {"guard ttft", "fast ttft"}),
        ("fleet: workers crash every 10 s", {"fast incidents"}),
        ("fleet: golden prompt differs", {"golden"}),
    ],
)
def test_worse_versions_are_found_in_simulated_fleets(kind: str, reasons: set[str]) -> None:
    [expected] = [one for one in FLEETS if one.scenario.name == kind]
    found = expected.roll_out(0)
    assert (found.action, found.violations) == ("rollback", ())
    assert found.reason in reasons


@pytest.mark.slow
def test_the_scenarios_of_fleets_end_as_they_should_with_generated_events() -> None:
    for expected in EVENTS:
        summary = Summary(expected, (expected.roll_out(0), expected.roll_out(1)))
        assert summary.failures == []


def end(action: str, reason: str = "passed", *violations: str) -> RolloutEnd:
    return RolloutEnd(action, reason, "", 30.0, 50, violations)


def summary(*ends: RolloutEnd, expected: Expectation = EQUAL[0]) -> Summary:
    return Summary(expected, ends)


def test_a_campaign_of_equal_versions_may_roll_back_one_in_a_hundred() -> None:
    promoted = [end("promoted")] * 495
    few = [end("rollback", "fast errors")] * 5
    assert judged([summary(*promoted, *few)]) == []
    assert judged([summary(*promoted, *few, end("step back", "both bad"))]) == [
        "equal versions: 6 of 501 rolled back"
    ]
    assert judged([summary(*promoted, *[end("rollback", "guard errors")] * 2)]) == [
        "equal versions: the guard rolled back 2 of 497"
    ]
    assert judged([summary(*promoted[:84], *[end("pause")] * 16)]) == [
        "equal versions: 84 of 100 promoted"
    ]


def test_a_campaign_names_what_was_not_found_or_found_late() -> None:
    expected = Expectation(Scenario("worse"), 10, ("rollback",), 0.9, 20.0, 40)
    ends = [*[end("rollback")] * 8, *[end("promoted")] * 2]
    assert summary(*ends, expected=expected).failures == [
        "worse: 8 of 10 ended as they should",
        "worse: a median of 30 s; at most 20",
        "worse: a median of 50 canary requests",
    ]
    broken = summary(
        end("rollback", "x", "step 1 advanced early"),
        expected=expected._replace(median_s=0.0, median_requests=0),
    )
    assert broken.failures == ["worse: step 1 advanced early"]


def test_a_campaign_names_fleets_that_end_in_another_way_than_generated_events() -> None:
    equal = [summary(end("promoted"), expected=EVENTS[0])]
    promoted, paused = (
        summary(*[end(action)] * 3, expected=FLEETS[0]) for action in ("promoted", "pause")
    )
    assert judged([*equal, promoted]) == judged([paused]) == []
    assert judged([*equal, paused]) == [
        "fleet: equal, Zipf users: mostly pause, and mostly promoted with generated events"
    ]


def test_a_seed_repeats_its_rollout() -> None:
    scenario = Scenario("errors", errors=0.9)
    assert roll_out(scenario, 3) == roll_out(scenario, 3) != roll_out(scenario, 4)


@pytest.mark.slow
def test_the_command_shows_each_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "golden", "--share", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert "golden prompt differs" in shown
    assert "6 rollouts in" in shown
