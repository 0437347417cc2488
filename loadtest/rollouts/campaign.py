"""Drive rollouts with generated traffic through the production assignment and judge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ops.rollouts.evidence import RolloutEvidence
from ops.rollouts.judge import judge
from ops.rollouts.plan import Objective, RolloutPlan, StepCosts
from triolet.config.routes import NUM_BUCKETS

from .traffic import BATCH_S, TTFT_LIMIT_S, WORKERS, Scenario, Traffic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transport.rollout_protocol import FinishedRequest

LOOK_S: Final = 2
"""Seconds between two looks of the judge."""
OBJECTIVES: Final = {"errors": Objective(0.99), "ttft": Objective(0.95, TTFT_LIMIT_S)}
GOLDEN_DIFFERENCE: Final = "prompt 3: 17, not 21"
COSTS: Final = StepCosts(0.005, 0.0005, 1e-7, 2e-5)


class RolloutEnd(NamedTuple):
    """How a simulated rollout ended.

    Attributes:
      action: "promoted", "rollback", "step back" or "pause".
      reason: of the last verdict.
      said: of the last verdict.
      seconds: time from the first step to the end.
      canary_requests: requests to the candidate by then.
      violations: rules that the judge broke.
    """

    action: str
    reason: str
    said: str
    seconds: float
    canary_requests: int
    violations: tuple[str, ...]


def plan_of(scenario: Scenario, seed: int) -> RolloutPlan:
    """Return the plan of a rollout; the seed is its secret."""
    return RolloutPlan(
        stable="chat-1",
        candidate="chat-2",
        salt=f"{scenario.name} {seed:016}",
        shares=scenario.shares,
        objectives=OBJECTIVES,
        costs=COSTS,
        bake_s=scenario.bake_s,
        max_step_s=scenario.max_step_s,
    )


class JudgedRollout:
    """A rollout that follows its judge, and checks what the judge must never do.

    Args:
      plan: its plan.

    Attributes:
      plan: see Args.
      evidence: the evidence of the current step.
    """

    def __init__(self, plan: RolloutPlan) -> None:
        self.plan = plan
        self.evidence = RolloutEvidence().begin_step(plan, 0, 0.0)
        self._began_at = 0.0
        self._buckets: list[int] = []  # of the step's requests to the candidate
        self._earlier = 0
        self._violations: list[str] = []

    def look(self, ended: Sequence[FinishedRequest], now: float) -> RolloutEnd | None:
        """Add requests and do what the judge says; return the end, if this is it."""
        plan, evidence = self.plan, self.evidence
        evidence.add_requests(plan, ended, now)
        self._buckets += (
            request.user % NUM_BUCKETS
            for request in ended
            if request.version == plan.candidate and request.chosen_at >= evidence.began_at
        )
        verdict = judge(evidence, plan)
        if verdict.look is not None:
            evidence.looks.append(verdict.look)
        if verdict.action == "hold":
            return None
        if verdict.action == "advance" and evidence.step:
            self._check_advance(now)
        if verdict.action == "advance" and evidence.step < plan.last_step:
            self.evidence = evidence.begin_step(plan, verdict.to_step, now)
            self._began_at = self._began_at or now
            self._earlier += len(self._buckets)
            self._buckets = []
            return None
        action = "promoted" if verdict.action == "advance" else str(verdict.action)
        return RolloutEnd(
            "step back" if verdict.action == "rollback" and verdict.to_step else action,
            f"{verdict.reason} {verdict.signal}".strip(),
            verdict.said,
            now - self._began_at,
            self._earlier + len(self._buckets),
            tuple(self._violations),
        )

    def _check_advance(self, now: float) -> None:
        plan, step = self.plan, self.evidence.step
        if len(self._buckets) < plan.min_requests or len(set(self._buckets)) < plan.min_buckets:
            self._violations.append(f"step {step} advanced without the minimum evidence")
        if now - self.evidence.began_at < plan.bake_s:
            self._violations.append(f"step {step} advanced before its bake time was over")


def roll_out(scenario: Scenario, seed: int) -> RolloutEnd:
    """Run one rollout with generated traffic to its end."""
    plan = plan_of(scenario, seed)
    traffic, rollout, now = Traffic(scenario, plan, seed), JudgedRollout(plan), 0
    while True:
        now += LOOK_S
        evidence = rollout.evidence
        if traffic.step != evidence.step:
            traffic.begin_step(evidence.step)
        ended = traffic.finished(now - LOOK_S, now)
        incidents = traffic.incidents(now - LOOK_S, now)
        evidence.add_incidents(plan, incidents, traffic.on_canary / WORKERS)
        if now % BATCH_S == 0 and 0 < evidence.step < plan.last_step:
            evidence.add_work(COSTS, *traffic.work())
        if scenario.golden_step and evidence.step == scenario.golden_step:
            evidence.golden_difference = GOLDEN_DIFFERENCE
        if (end := rollout.look(ended, now)) is not None:
            return end
