"""A plan, users of each version, and requests, for tests of rollouts."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Final

from ops.rollouts.evidence import RolloutEvidence
from ops.rollouts.plan import Objective, RolloutPlan, StepCosts
from transport.rollout_protocol import FinishedRequest
from triolet.config.routes import NUM_BUCKETS, user_hash

if TYPE_CHECKING:
    from collections.abc import Iterator

STEP_S: Final = 100.0
"""When the step of `begun` begins."""
COSTS: Final = StepCosts(0.01, 0.001, 0.0, 0.0)


def plan(**changes: object) -> RolloutPlan:
    """Return a plan with steps of 10, 50 and 100 %."""
    fields: dict[str, Any] = {
        "stable": "old",
        "candidate": "new",
        "salt": "a secret of a test",
        "shares": (0.1, 0.5, 1.0),
        "objectives": {"errors": Objective(0.99), "ttft": Objective(0.95, 1.0)},
        "costs": None,
    }
    return RolloutPlan(**fields | changes)


def version_of(chosen: RolloutPlan, user: int, step: int) -> str:
    return chosen.route(step, step).version_for("", str(user % NUM_BUCKETS), 0.0)


def users(chosen: RolloutPlan, *versions: str) -> Iterator[int]:
    """Return users, each with another bucket, that have these versions in the steps from 1 on."""
    buckets: set[int] = set()
    for number in count():
        user = user_hash("tenant", f"user {number}")
        found = tuple(version_of(chosen, user, step + 1) for step in range(len(versions)))
        if found == versions and user % NUM_BUCKETS not in buckets:
            buckets.add(user % NUM_BUCKETS)
            yield user


def begun(chosen: RolloutPlan, step: int = 1) -> RolloutEvidence:
    """Return the evidence at the beginning of a step."""
    return RolloutEvidence().begin_step(chosen, 0, 0.0).begin_step(chosen, step, STEP_S)


def request(
    user: int, version: str, at: float = STEP_S, *, is_bad: bool = False, ttft_s: float = 0.5
) -> FinishedRequest:
    """Return a request that took one second."""
    missed = frozenset({"errors"}) if is_bad else frozenset[str]()
    return FinishedRequest(user, version, at, at + 1.0, missed, {"ttft": ttft_s})
