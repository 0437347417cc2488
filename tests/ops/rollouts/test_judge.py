"""Tests of the judge: an example by hand for each check and each rule about the end of a step."""

from __future__ import annotations

import doctest
import math
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from ops.rollouts import inference
from ops.rollouts.evidence import CostSums, RolloutEvidence, StepLook
from ops.rollouts.judge import INCIDENTS, RolloutVerdict, cost_bounds, judge
from ops.rollouts.plan import Objective
from transport.rollout_protocol import SeenIncident

from .mutants import MUTANTS
from .rollout_cases import COSTS, STEP_S, begun, plan, request, users

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ops.rollouts.plan import RolloutPlan
    from transport.rollout_protocol import FinishedRequest

ROOT = Path(__file__).parents[3]
ERRORS = {"errors": Objective(0.99)}


def requests(
    chosen: RolloutPlan,
    versions: Sequence[str],
    good: int = 0,
    bad: int = 0,
    at: float = STEP_S,
    *,
    each: int = 1,
) -> list[FinishedRequest]:
    """Return requests of users who have these versions in the steps from 1 on, `each` of a user."""
    found = islice(users(chosen, *versions), good + bad)
    return [
        request(user, versions[-1], at, is_bad=number < bad)
        for number, user in enumerate(found)
        for _ in range(each)
    ]


def look(
    chosen: RolloutPlan,
    *groups: list[FinishedRequest],
    step: int = 1,
    after_s: float = 10.0,
    evidence: RolloutEvidence | None = None,
) -> tuple[RolloutVerdict, RolloutEvidence]:
    """Return the verdict some time after the step began."""
    evidence = evidence or begun(chosen, step)
    evidence.add_requests(chosen, [one for group in groups for one in group], STEP_S + after_s)
    return judge(evidence, chosen), evidence


def costing(ratio: float, batches: int = 400, noise: float = 0.1) -> CostSums:
    """Return sums of batches with this cost ratio and noise."""
    mean = math.log(ratio)
    return CostSums(batches, batches * mean, batches * (mean**2 + noise**2))


def enough(chosen: RolloutPlan, at: float = STEP_S) -> list[list[FinishedRequest]]:
    """Return good requests that suffice for the first step."""
    new = requests(chosen, ("new",), 20, at=at, each=10)
    return [new, requests(chosen, ("old",), 180, at=at)]


# The guard


def test_the_guard_rolls_back_for_bad_users_that_chance_would_not_give_to_the_candidate() -> None:
    chosen = plan(objectives=ERRORS)
    # Five bad buckets, all among the tenth that the candidate has: 0.1 ** 5.
    verdict, _ = look(chosen, requests(chosen, ("new",), 5, 5), requests(chosen, ("old",), 50))
    assert (verdict.action, verdict.reason, verdict.signal) == ("rollback", "guard", "errors")
    assert verdict.to_step == 0
    assert verdict.said == (
        "5 of 10 requests to new missed errors in the last 60 s, from 5 buckets of users, and "
        "requests to old from 0; with 10% of all users, the chance of this is 1e-05"
    )


def test_the_guard_waits_if_chance_may_have_done_it() -> None:
    chosen = plan(objectives=ERRORS)
    # P(Bin(8, 0.1) >= 5) = 4.3e-4, and P(Bin(6, 0.1) >= 5) = 5.5e-5.
    new = requests(chosen, ("new",), 0, 5)
    verdict, _ = look(chosen, new, requests(chosen, ("old",), 50, 3))
    assert verdict.action == "hold"
    verdict, _ = look(chosen, new, requests(chosen, ("old",), 50, 1))
    assert verdict.reason == "guard"


def test_the_guard_counts_users_and_not_requests() -> None:
    chosen = plan(objectives=ERRORS)
    verdict, _ = look(
        chosen, requests(chosen, ("new",), 0, 3, each=100), requests(chosen, ("old",), 50)
    )
    assert verdict.action == "hold"


def test_the_guard_needs_a_share_far_above_the_objective() -> None:
    # 14.4 % of requests at an objective of 99 %: 6 of 41 are above it, 6 of 42 below.
    chosen = plan(objectives=ERRORS)
    reasons = [look(chosen, requests(chosen, ("new",), good, 6))[0].reason for good in (35, 36)]
    assert reasons == ["guard", "fast"]
    # At 90 %, 14.4 times the budget is more than all: half.
    chosen = plan(objectives={"errors": Objective(0.9)})
    reasons = [look(chosen, requests(chosen, ("new",), good, 6))[0].reason for good in (6, 7)]
    assert reasons == ["guard", "fast"]


def test_the_guard_needs_five_bad_requests() -> None:
    chosen = plan(objectives=ERRORS, shares=(0.01, 1.0))
    reasons = [look(chosen, requests(chosen, ("new",), 0, bad))[0].reason for bad in (4, 5)]
    assert reasons == ["fast", "guard"]


def test_objectives_are_not_added_up() -> None:
    chosen = plan()
    users_of_new = islice(users(chosen, "new"), 60)
    # 5 of 60 fail and 20 of 60 are late: neither is far above its own objective.
    mixed = [
        one
        for number, user in enumerate(users_of_new)
        for one in (
            request(user, "new"),
            request(user, "new", STEP_S + 2, is_bad=number < 5, ttft_s=2.0 if number > 40 else 0.5),
        )
    ]
    assert look(chosen, mixed)[0].reason != "guard"


def test_with_all_requests_the_guard_acts_if_the_stable_version_was_good() -> None:
    chosen = plan(objectives=ERRORS)
    failing = requests(chosen, ("new", "new", "new"), 41, 9)
    verdict, _ = look(chosen, failing, step=3)
    assert (verdict.action, verdict.reason) == ("rollback", "guard")
    assert look(chosen, failing[1:], step=3)[0].reason == "bake", "49 requests do not suffice"
    was_bad = begun(chosen, 3)
    was_bad.was_good["errors"] = False
    verdict, _ = look(chosen, failing, evidence=was_bad)
    assert (verdict.action, verdict.reason) == ("hold", "both bad")


def test_with_all_requests_one_user_is_not_enough() -> None:
    chosen = plan(objectives=ERRORS)
    heavy = requests(chosen, ("new", "new", "new"), 0, 1, each=100)
    verdict, _ = look(chosen, heavy, requests(chosen, ("old", "old", "new"), 60, 3), step=3)
    assert verdict.action == "hold"


def test_a_changed_answer_to_a_golden_prompt_rolls_back() -> None:
    chosen = plan()
    evidence = begun(chosen)
    evidence.golden_difference = "prompt 2, token 5: 17, not 21"
    verdict = judge(evidence, chosen)
    assert (verdict.action, verdict.reason) == ("rollback", "golden")
    assert verdict.said.endswith("prompt 2, token 5: 17, not 21")


# Both versions


def test_if_both_versions_become_bad_the_rollout_goes_back_one_step() -> None:
    chosen = plan(objectives=ERRORS)
    old, new = ("old", "old"), ("old", "new")
    verdict, _ = look(chosen, requests(chosen, old, 10, 20), requests(chosen, new, 10, 20), step=2)
    assert (verdict.action, verdict.reason, verdict.to_step) == ("rollback", "both bad", 1)
    assert "before this step old was good" in verdict.said


def test_if_the_stable_version_was_bad_before_the_rollout_waits_and_then_pauses() -> None:
    chosen = plan(objectives=ERRORS, bake_s=60.0, max_step_s=120.0)
    evidence = begun(chosen)
    evidence.was_good["errors"] = False
    bad = [requests(chosen, ("old",), 5, 20), requests(chosen, ("new",), 8, 3, each=4)]
    verdict, evidence = look(chosen, *bad, evidence=evidence)
    assert (verdict.action, verdict.reason) == ("hold", "both bad")
    later = requests(chosen, ("new",), 8, 3, at=STEP_S + 100, each=4)
    verdict, _ = look(chosen, later, evidence=evidence, after_s=120.0)
    assert (verdict.action, verdict.reason) == ("pause", "time")
    assert "has lasted 120 s" in verdict.said


# The fast test


def test_the_fast_test_rolls_back_at_its_limit() -> None:
    chosen = plan(objectives=ERRORS)
    # Bad requests among many good ones, so that the guard is silent. Limit: 2 * 2 / 0.004 = 1,000.
    calm = [requests(chosen, ("new",), 60, 0, each=3), requests(chosen, ("old",), 50, 0)]
    for bad, action in ((4, "hold"), (5, "rollback")):
        verdict, _ = look(chosen, *calm, requests(chosen, ("new",), 0, bad, at=STEP_S + 1))
        assert verdict.action == action
    assert (verdict.reason, verdict.signal) == ("fast", "errors")
    # The mean of (theta / (1 + (theta - 1) / 10)) ** 5 over the eight bets.
    thetas = (1.1, 1.25, 1.5, 2, 3, 5, 10, 20)
    by_hand = sum((theta / (1 + (theta - 1) * 0.1)) ** 5 for theta in thetas) / 8
    assert by_hand > 1000
    assert f"log e is {math.log(by_hand):.1f}, the limit is 6.9" in verdict.said


def test_failures_of_the_stable_version_are_evidence_for_the_candidate() -> None:
    chosen = plan(objectives=ERRORS)
    calm = requests(chosen, ("new",), 60, 0, each=3)
    bad = requests(chosen, ("new",), 0, 5, at=STEP_S + 1)
    assert look(chosen, calm, bad, requests(chosen, ("old",), 0, 10))[0].action == "hold"


def test_the_fast_test_uses_the_share_that_the_step_moves() -> None:
    chosen = plan(objectives=ERRORS)
    calm = requests(chosen, ("old", "new"), 200, 0)
    bad = requests(chosen, ("old", "new"), 0, 14, at=STEP_S + 1)
    verdict, _ = look(chosen, calm, bad, step=2)
    assert verdict.reason == "fast"
    assert "which this step gave 44% of them" in verdict.said, "0.4 of 0.9"


def test_users_moved_in_earlier_steps_are_no_evidence_for_the_fast_test() -> None:
    chosen = plan(objectives=ERRORS)
    calm = requests(chosen, ("new", "new"), 200, 0)
    bad = requests(chosen, ("new", "new"), 0, 14, at=STEP_S + 1)
    assert look(chosen, calm, bad, step=2)[0].action == "hold"


def test_incidents_of_the_candidates_workers_roll_back() -> None:
    chosen = plan(objectives=ERRORS)
    evidence = begun(chosen)
    incidents = [SeenIncident("w", STEP_S + 10 * n, "new") for n in range(5)]
    evidence.add_incidents(chosen, incidents[:4], 0.1)
    assert judge(evidence, chosen).action == "hold"
    evidence.add_incidents(chosen, incidents[4:], 0.1)
    verdict = judge(evidence, chosen)
    assert (verdict.action, verdict.reason, verdict.signal) == ("rollback", "fast", INCIDENTS)
    assert verdict.said.startswith("5 of 5 incidents are new's")


# Costs


@pytest.mark.parametrize(
    ("ratio", "accept_cost", "step", "action", "reason"),
    [
        (1.0, None, 2, "advance", "passed"),
        (1.0, None, 1, "advance", "passed"),
        (1.15, None, 1, "hold", "cost"),
        (1.15, None, 2, "pause", "cost"),
        (1.15, 1.3, 2, "advance", "passed"),
        (1.4, None, 1, "rollback", "cost"),
        (1.4, 1.5, 1, "advance", "passed"),
        (1.6, 1.5, 1, "rollback", "cost"),
        (1.12, 1.12, 2, "hold", "cost"),
    ],
)
def test_costs_decide(
    ratio: float, accept_cost: float | None, step: int, action: str, reason: str
) -> None:
    chosen = plan(objectives=ERRORS, costs=COSTS, accept_cost=accept_cost)
    evidence = begun(chosen, step)
    evidence.cost = costing(ratio)
    if step == 1:
        good = enough(chosen)
    else:
        good = [requests(chosen, ("old", one), 30, each=10) for one in ("old", "new")]
    verdict, _ = look(chosen, *good, evidence=evidence, after_s=60.0)
    assert (verdict.action, verdict.reason) == (action, reason)


def test_a_cost_that_may_be_acceptable_does_not_roll_back() -> None:
    chosen = plan(objectives=ERRORS, costs=COSTS)
    evidence = begun(chosen)
    evidence.cost = costing(1.2, batches=20)
    bounds = cost_bounds(evidence)
    assert bounds is not None
    assert 1.05 < bounds[0] < 1.1 < 1.25 < bounds[1]
    assert look(chosen, *enough(chosen), evidence=evidence, after_s=60.0)[0].action == "advance"


def test_an_unknown_cost_holds_only_before_the_last_step() -> None:
    chosen = plan(objectives=ERRORS, costs=COSTS)
    assert look(chosen, *enough(chosen), after_s=60.0)[0].action == "advance"
    both = [requests(chosen, ("old", one), 30, each=10) for one in ("old", "new")]
    verdict, evidence = look(chosen, *both, step=2, after_s=60.0)
    assert (verdict.action, verdict.reason) == ("hold", "cost")
    verdict, _ = look(chosen, evidence=evidence, after_s=3600.0)
    assert (verdict.action, verdict.reason) == ("pause", "time")


def test_costs_of_versions_that_compute_the_same_do_not_matter() -> None:
    chosen = plan(objectives=ERRORS, costs=None)
    evidence = begun(chosen)
    evidence.cost = costing(3.0)
    assert look(chosen, *enough(chosen), evidence=evidence, after_s=60.0)[0].action == "advance"


def test_bounds_of_the_cost_are_ratios() -> None:
    evidence = begun(plan())
    assert cost_bounds(evidence) is None
    evidence.cost = costing(2.0)
    bounds = cost_bounds(evidence)
    assert bounds is not None
    assert bounds[0] < 2.0 < bounds[1]
    assert bounds[0] * bounds[1] == pytest.approx(4.0)


# The end of a step


def test_a_step_ends_after_its_bake_time_and_enough_requests_of_enough_users() -> None:
    chosen = plan(objectives=ERRORS)
    verdict, _ = look(chosen, *enough(chosen), after_s=59.9)
    assert (verdict.action, verdict.reason) == ("hold", "bake")
    assert verdict.said == "step 1 has run for 60 of 60 s"
    verdict, _ = look(chosen, *enough(chosen), after_s=60.0)
    assert (verdict.action, verdict.reason, verdict.to_step) == ("advance", "passed", 2)
    few = requests(chosen, ("new",), 20, each=10)[1:]
    verdict, _ = look(chosen, few, requests(chosen, ("old",), 180), after_s=60.0)
    assert (verdict.action, verdict.reason) == ("hold", "evidence")
    assert verdict.said == (
        "new has had 199 requests from 20 buckets of users; it needs 200 from 20"
    )
    heavy = requests(chosen, ("new",), 19, each=20)
    assert look(chosen, heavy, after_s=60.0)[0].reason == "evidence"


def test_a_step_without_enough_evidence_pauses_at_last() -> None:
    chosen = plan(objectives=ERRORS)
    verdict, evidence = look(chosen, requests(chosen, ("new",), 19), after_s=3599.9)
    assert verdict.action == "hold"
    verdict, _ = look(chosen, evidence=evidence, after_s=3600.0)
    assert (verdict.action, verdict.reason) == ("pause", "time")
    assert verdict.said.startswith("step 1 has lasted 3600 s: new has had 19 requests")


def test_the_time_before_the_first_step_needs_no_candidate() -> None:
    chosen = plan()
    verdict, _ = look(chosen, step=0, after_s=60.0)
    assert (verdict.action, verdict.to_step) == ("advance", 1)


def test_after_the_last_step_the_rollout_is_over() -> None:
    chosen = plan()
    verdict, _ = look(
        chosen, requests(chosen, ("new", "new", "new"), 50, each=5), step=3, after_s=60.0
    )
    assert (verdict.action, verdict.to_step, verdict.look) == ("advance", 3, None)


def judged_at_the_end(bad_of_new: int, looks: int = 0) -> tuple[RolloutVerdict, RolloutEvidence]:
    """Return the verdict if a tenth of the users, all with the candidate, had some failures."""
    chosen = plan(objectives={"errors": Objective(0.9)}, shares=(0.5, 1.0))
    evidence = begun(chosen)
    evidence.looks = [StepLook(STEP_S + 60.0 * n, n, {}) for n in range(1, looks + 1)]
    new = requests(chosen, ("new",), 60 - bad_of_new, bad_of_new, each=6)
    old = requests(chosen, ("old",), 56, 4, each=6)
    return look(chosen, new, old, evidence=evidence, after_s=60.0 + 60.0 * looks)


def test_equal_versions_pass_the_test_at_the_end() -> None:
    verdict, _ = judged_at_the_end(4)
    assert verdict.action == "advance"
    assert verdict.look is not None
    assert verdict.look.p_values["errors"] > 0.3
    assert verdict.look.at == STEP_S + 60.0


def test_a_doubtful_test_keeps_the_step_for_one_more_bake_and_then_pauses() -> None:
    verdict, evidence = judged_at_the_end(11)
    assert (verdict.action, verdict.reason) == ("hold", "step")
    assert verdict.look is not None
    assert 0.002 < verdict.look.p_values["errors"] <= 0.05
    evidence.looks.append(verdict.look)
    assert judge(evidence, plan(shares=(0.5, 1.0), objectives=ERRORS)).reason == "bake"
    verdict, _ = judged_at_the_end(11, looks=1)
    assert (verdict.action, verdict.reason) == ("pause", "step")
    assert verdict.said.endswith("test 2 of 2")


def test_a_clear_test_rolls_back() -> None:
    verdict, _ = judged_at_the_end(17)
    assert (verdict.action, verdict.reason, verdict.signal) == ("rollback", "step", "errors")
    assert verdict.look is not None
    assert verdict.look.p_values["errors"] <= 0.004 / 2


def test_the_worst_objective_decides() -> None:
    chosen = plan(
        shares=(0.5, 1.0), objectives={"errors": Objective(0.9), "safety": Objective(0.9)}
    )
    bad = [one.user for one in requests(chosen, ("new",), 0, 17)]
    all_of_new = requests(chosen, ("new",), 60, each=6)
    new = [
        msgspec.structs.replace(one, missed=frozenset({"safety"})) if one.user in bad else one
        for one in all_of_new
    ]
    verdict, _ = look(chosen, new, requests(chosen, ("old",), 60, each=6), after_s=60.0)
    assert (verdict.action, verdict.reason, verdict.signal) in {
        ("rollback", "step", "safety"),
        ("rollback", "fast", "safety"),
    }


def test_two_tests_of_a_step_draw_different_assignments() -> None:
    seeds = {judged_at_the_end(4, looks)[0].look.seed for looks in (0, 1)}  # type: ignore[union-attr]
    assert len(seeds) == 2


def test_a_verdict_can_be_written_down() -> None:
    verdict, _ = judged_at_the_end(17)
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=RolloutVerdict) == verdict


# The tests themselves


def test_examples_of_the_statistics_are_right() -> None:
    assert doctest.testmod(inference) == (0, 3)


def test_each_mutant_changes_one_place() -> None:
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.guard) == 1, mutant
        assert mutant.instead != mutant.guard
