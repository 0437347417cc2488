"""The judge of a rollout: from the evidence and the plan to advance, hold, roll back or pause.

Four checks: the guard, the fast test, the test at the end of a step, and costs. See
docs/architecture/judge.md for what each finds and how rarely it is wrong. No I/O, no clock.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal, TypeAlias
from zlib import crc32

import msgspec

from .evidence import WINDOW_S, StepLook
from .inference import binomial_tail, bucket_log_e, log_e_value, mean_bounds, randomization_p
from .plan import LOOKS

if TYPE_CHECKING:
    from .evidence import RolloutEvidence
    from .plan import RolloutPlan

CHANCE_LIMIT: Final = 1e-4
"""The guard rolls back only if equal versions would so rarely divide the bad buckets like that."""
MIN_UNCOMPARED: Final = 50
"""Requests within the window without which the guard does not act at 100 %: when the traffic moves,
the first ones are slow for any version, and no other version is there to compare with."""
INCIDENTS: Final = "incidents"
"""The signal of the workers' incidents."""

RolloutAction: TypeAlias = Literal["advance", "hold", "rollback", "pause"]
RolloutReason: TypeAlias = Literal[
    "golden",  # a golden prompt has another answer than at first
    "guard",  # many bad requests of many users within a minute
    "fast",  # the bad buckets are too often the candidate's
    "step",  # the candidate was worse over the whole step
    "cost",
    "both bad",  # both versions miss an objective
    "bake",  # the step is too short
    "evidence",  # too few requests or users
    "time",  # the step is too long
    "frozen",  # no rollout may go on now
    "passed",
]


class RolloutVerdict(msgspec.Struct, frozen=True):
    """The judge's decision.

    Attributes:
      action: what to do.
      reason: why.
      said: the same for people, with the numbers.
      signal: the objective, or INCIDENTS; empty if it is about none.
      to_step: step to go to, of an advance or a rollback; 0 removes the candidate.
      look: the test that was made; the caller adds it to the evidence's `looks`.
    """

    action: RolloutAction
    reason: RolloutReason
    said: str
    signal: str = ""
    to_step: int = 0
    look: StepLook | None = None


def judge(evidence: RolloutEvidence, plan: RolloutPlan) -> RolloutVerdict:
    """Decide what to do with a rollout. Call it every few seconds, as often as you like."""
    verdict = alarm(evidence, plan) or _lacking(evidence, plan)
    if verdict is None:
        return _end_of_step(evidence, plan)
    if verdict.action == "hold" and evidence.now - evidence.timed_from >= plan.max_step_s:
        said = f"step {evidence.step} has lasted {plan.max_step_s:g} s: {verdict.said}"
        return msgspec.structs.replace(verdict, action="pause", reason="time", said=said)
    return verdict


def alarm(evidence: RolloutEvidence, plan: RolloutPlan) -> RolloutVerdict | None:
    """Return the verdict of the checks that do not wait for the end of a step; None if they find
    nothing."""
    for check in (_golden, _guard, _fast, _too_costly, _both_bad):
        if (verdict := check(evidence, plan)) is not None:
            return verdict
    return None


def _golden(evidence: RolloutEvidence, plan: RolloutPlan) -> RolloutVerdict | None:
    if not evidence.golden_difference:
        return None
    said = (
        f"{plan.candidate} has changed its answer to a golden prompt {evidence.golden_difference}"
    )
    return RolloutVerdict("rollback", "golden", said)


def _guard(evidence: RolloutEvidence, plan: RolloutPlan) -> RolloutVerdict | None:
    """Roll back if the candidate misses an objective by far, for users that chance would not have
    given to it. With all requests there is no chance: then for several users, and not before."""
    share = plan.share(evidence.step)
    for name, objective in plan.objectives.items():
        good, bad = evidence.recent(name)[2:]
        if not objective.is_burning(good, bad):
            continue
        stable = len(evidence.recent_bad(name, is_canary=False))
        canary = len(evidence.recent_bad(name, is_canary=True))
        if share < 1.0:
            chance = binomial_tail(canary, stable + canary, share)
        else:
            is_new = evidence.was_good[name] and good + bad >= MIN_UNCOMPARED
            chance = 1.0 - (is_new and evidence.is_burning(name, objective, is_canary=True))
        if chance <= CHANCE_LIMIT:
            said = (
                f"{bad} of {good + bad} requests to {plan.candidate} missed {name} in the last "
                f"{WINDOW_S} s, from {canary} buckets of users, and requests to {plan.stable} from "
                f"{stable}; with {share:.0%} of all users, the chance of this is {chance:.1g}"
            )
            return RolloutVerdict("rollback", "guard", said, name)
    return None


def _fast(evidence: RolloutEvidence, plan: RolloutPlan) -> RolloutVerdict | None:
    """Roll back if the buckets with a first bad request are too often the candidate's."""
    share = plan.moved_share(evidence.step)
    if not 0.0 < share < 1.0:
        return None
    counts = evidence.first_bad | {INCIDENTS: evidence.incidents}
    log_e = {name: bucket_log_e(bad[0], bad[1], share) for name, bad in counts.items()}
    log_e[INCIDENTS] = log_e_value(evidence.incident_bets)
    name = max(log_e, key=log_e.__getitem__)
    if log_e[name] < math.log(plan.fast_threshold):
        return None
    stable, canary = counts[name]
    things = name if name == INCIDENTS else f"buckets of users that missed {name}"
    said = (
        f"{canary} of {stable + canary} {things} are {plan.candidate}'s, which this step gave "
        f"{share:.0%} of them; log e is {log_e[name]:.1f}, the limit is "
        f"{math.log(plan.fast_threshold):.1f}"
    )
    return RolloutVerdict("rollback", "fast", said, name)


def cost_bounds(evidence: RolloutEvidence) -> tuple[float, float] | None:
    """Return bounds of the candidate's cost, divided by the stable version's for the same work;
    None while there are none."""
    cost = evidence.cost
    bounds = mean_bounds(cost.batches, cost.total, cost.squares)
    return None if bounds is None else (math.exp(bounds[0]), math.exp(bounds[1]))


def _too_costly(evidence: RolloutEvidence, plan: RolloutPlan) -> RolloutVerdict | None:
    bounds, limit = cost_bounds(evidence), plan.cost_limits[1]
    if plan.costs is None or bounds is None or bounds[0] <= limit:
        return None
    said = (
        f"{plan.candidate} is correct but too expensive: the same work takes {bounds[0]:.2f} to "
        f"{bounds[1]:.2f} times as much device time; the limit is {limit:g} (--accept-cost)"
    )
    return RolloutVerdict("rollback", "cost", said)


def _both_bad(evidence: RolloutEvidence, plan: RolloutPlan) -> RolloutVerdict | None:
    """Go back one step if both versions miss an objective that the stable one met before the step;
    hold if it missed it before."""
    for name, objective in plan.objectives.items():
        was_good = evidence.was_good[name]
        if not evidence.is_burning(name, objective, is_canary=True):
            continue
        if was_good and not evidence.is_burning(name, objective, is_canary=False):
            continue
        recent = evidence.recent(name)
        said = (
            f"{recent[1]} of {sum(recent[:2])} requests to {plan.stable} and {recent[3]} of "
            f"{sum(recent[2:])} to {plan.candidate} missed {name} in the last {WINDOW_S} s; before "
            f"this step {plan.stable} was {'good' if was_good else 'bad, too'}"
        )
        action: RolloutAction = "rollback" if was_good else "hold"
        back = max(0, evidence.step - 1)
        return RolloutVerdict(action, "both bad", said, name, back if was_good else 0)
    return None


def _lacking(evidence: RolloutEvidence, plan: RolloutPlan) -> RolloutVerdict | None:
    """Return what the step lacks before it may end; None if nothing."""
    looked_at = evidence.looks[-1].at if evidence.looks else 0.0
    baked_s = evidence.now - max(evidence.timed_from, looked_at)
    if baked_s < plan.bake_s:
        said = f"step {evidence.step} has run for {baked_s:.0f} of {plan.bake_s:g} s"
        return RolloutVerdict("hold", "bake", said)
    requests, buckets = evidence.canary
    if evidence.step and (requests < plan.min_requests or buckets < plan.min_buckets):
        said = (
            f"{plan.candidate} has had {requests} requests from {buckets} buckets of users; it "
            f"needs {plan.min_requests} from {plan.min_buckets}"
        )
        return RolloutVerdict("hold", "evidence", said)
    if plan.costs is None or not 0 < evidence.step < plan.last_step:
        return None
    low, high = cost_bounds(evidence) or (0.0, math.inf)
    is_last, limit = evidence.step + 1 == plan.last_step, plan.cost_limits[0]
    if low <= limit and not (is_last and high > limit):
        return None
    action: RolloutAction = "pause" if is_last and low > limit else "hold"
    said = (
        f"the same work takes {plan.candidate} {low:.2f} to {high:.2f} times as much device time; "
        f"the limit is {limit:g} (--accept-cost)"
    )
    if math.isinf(high):
        said = f"{evidence.cost.batches} batches of ten seconds do not suffice to compare costs"
    return RolloutVerdict(action, "cost", said)


def _end_of_step(evidence: RolloutEvidence, plan: RolloutPlan) -> RolloutVerdict:
    """Advance, unless the candidate was worse over the whole step."""
    next_step = min(evidence.step + 1, plan.last_step)
    passed = f"step {evidence.step} has passed"
    share = plan.moved_share(evidence.step)
    if not 0.0 < share < 1.0:
        return RolloutVerdict("advance", "passed", passed, to_step=next_step)
    seed = crc32(f"{plan.salt} {evidence.began_at} {len(evidence.looks)}".encode())
    p_values = {
        name: randomization_p(evidence.groups(name), share, seed, plan.doubt_level)
        for name in plan.objectives
    }
    look = StepLook(evidence.now, seed, p_values)
    name = min(p_values, key=p_values.__getitem__)
    if p_values[name] > plan.doubt_level:
        said = f"{passed}: the lowest p is {p_values[name]:.2g}, for {name}"
        return RolloutVerdict("advance", "passed", said, name, next_step, look)
    action: RolloutAction = "hold" if len(evidence.looks) + 1 < LOOKS else "pause"
    if p_values[name] <= plan.step_level:
        action = "rollback"
    said = (
        f"over the whole step, {plan.candidate} missed {name} more often than {plan.stable} "
        f"(p = {p_values[name]:.2g}; {plan.step_level:.2g} rolls back); test "
        f"{len(evidence.looks) + 1} of {LOOKS}"
    )
    return RolloutVerdict(action, "step", said, name, look=look)
