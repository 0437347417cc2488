"""The plan of a rollout: steps, objectives and limits, and the route of each step."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from triolet.config.limits import Count, NotNegative, Positive, Share, require
from triolet.config.routes import Route, RouteCaps
from triolet.units import SECONDS

if TYPE_CHECKING:
    from transport.rollout_protocol import WorkDone

FAST_BUDGET: Final = 0.004
"""Probability that the fast test ever rolls back a rollout of two equal versions."""
STEP_BUDGET: Final = 0.004
"""The same for the tests at the end of steps."""
GUARD_BUDGET: Final = 0.002
"""The same for the guard. It follows from no formula; `make simulate-rollouts` measures it."""
LOOKS: Final = 2
"""Tests at the end of a step: a doubtful first one keeps the step for one more bake."""
DOUBT: Final = 0.05
"""Probability that the first test of a step is doubtful although the versions are equal."""
COST_LIMIT: Final = 1.10
"""Cost ratio that a candidate may have before it gets all requests."""
COST_ROLLBACK: Final = 1.25
"""Cost ratio above which a candidate is rolled back, though it is correct."""
MAX_STEPS: Final = 20
"""The budgets are divided by the number of steps."""
DEFAULT_SHARES: Final = (0.01, 0.1, 0.5, 1.0)

BURN: Final = 14.4
"""Multiple of an objective's error budget at which the guard acts, as in the alert for pages."""
MAX_BAD_SHARE: Final = 0.5
"""The guard acts at this share of bad requests in any case."""
MIN_BAD: Final = 5
"""Bad requests without which the guard does not act."""


class Objective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A service level objective that requests meet or miss.

    Attributes:
      good_share: share of requests that should be good.
      limit_s: longest good time; None if requests name the objective that they missed.
    """

    good_share: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    limit_s: Positive | None = None

    def is_burning(self, good: int, bad: int) -> bool:
        """Return whether it is missed so often that the guard acts."""
        limit = min(BURN * (1.0 - self.good_share), MAX_BAD_SHARE)
        return bad >= MIN_BAD and bad >= limit * (good + bad)


class StepCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Device time of the stable version's work, as measured (`MeasuredCapacity` of the store).

    Attributes:
      step_s: fixed time of a step.
      row_s: further time per row.
      kv_token_s: further time per token that a row attends to.
      prompt_token_s: time per prompt token.
    """

    step_s: NotNegative
    row_s: NotNegative
    kv_token_s: NotNegative
    prompt_token_s: NotNegative

    def expected_s(self, work: WorkDone) -> float:
        """Return the device time that the stable version takes for this work."""
        decoding_s = work.steps * self.step_s + work.rows * self.row_s
        decoding_s += work.kv_tokens * self.kv_token_s
        return decoding_s + work.prompt_tokens * self.prompt_token_s


class StepRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The part of a plan that an operator writes.

    Attributes:
      shares: the candidate's share in each step; the last one is 1.
      bake_s: shortest duration of a step.
      max_step_s: a step that has not advanced by then pauses the rollout.
      accept_cost: cost ratio that the operator accepts; None for COST_LIMIT.
      min_requests: requests to the candidate in a step, without which it cannot advance.
      min_buckets: buckets that these must come from.
      excluded_tenants: tenants that stay on the stable version; they are no evidence.
    """

    shares: Annotated[tuple[Share, ...], msgspec.Meta(min_length=1, max_length=MAX_STEPS)] = (
        DEFAULT_SHARES
    )
    bake_s: Positive = 60 * SECONDS
    max_step_s: Positive = 3600 * SECONDS
    accept_cost: Annotated[float, msgspec.Meta(ge=1, le=100)] | None = None
    min_requests: Count = 200
    min_buckets: Count = 20
    excluded_tenants: tuple[str, ...] = ()


class RolloutPlan(StepRules, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a rollout may do, fixed when it starts.

    Attributes:
      stable: the version that serves now.
      candidate: the version that replaces it.
      salt: secret of this rollout, which decides the position of each bucket.
      objectives: by signal.
      costs: None if versions compute the same, so that their costs are equal.
      caps: bounds of what the candidate may hurt before the last step; None for none.
    """

    stable: str
    candidate: str
    salt: str
    objectives: Annotated[dict[str, Objective], msgspec.Meta(min_length=1, max_length=8)]
    costs: StepCosts | None
    caps: RouteCaps | None = None

    def __post_init__(self) -> None:
        rises = all(before < after for before, after in pairwise(self.shares))
        require(
            rises and self.shares[-1] == 1, "shares", self.shares, "rising numbers that end with 1"
        )
        require(
            self.candidate != self.stable,
            "candidate",
            self.candidate,
            "another version than stable",
        )
        require(len(self.salt) >= 16, "salt", "too short", "a secret of 16 characters or more")
        require(
            self.max_step_s >= LOOKS * self.bake_s,
            "max_step_s",
            self.max_step_s,
            f"at least {LOOKS} times bake_s, {LOOKS * self.bake_s:g} s",
        )

    @property
    def last_step(self) -> int:
        """Number of the step with all requests. Step 0 is the time before the first one."""
        return len(self.shares)

    def share(self, step: int) -> float:
        """Return the candidate's share in a step."""
        return self.shares[step - 1] if step else 0.0

    def moved_share(self, step: int) -> float:
        """Return the probability with which a step moves a stable bucket to the candidate."""
        before = self.share(max(0, step - 1))
        return (self.share(step) - before) / (1.0 - before)

    def route(self, step: int, revision: int, valid_until: float | None = None) -> Route:
        """Return the route of a step."""
        share = self.share(step)
        shares = {self.stable: 1.0 - share, self.candidate: share}
        caps = self.caps if share < 1.0 else None
        return Route(
            shares, self.stable, revision, self.salt, self.excluded_tenants, valid_until, caps
        )

    @property
    def fast_threshold(self) -> float:
        """The e-value that rolls back: each step and signal has an equal part of the budget.
        Incidents of workers are a signal, too."""
        return max(1, self.last_step - 1) * (len(self.objectives) + 1) / FAST_BUDGET

    @property
    def step_level(self) -> float:
        """The p-value at the end of a step that rolls back."""
        return STEP_BUDGET / (max(1, self.last_step - 1) * len(self.objectives) * LOOKS)

    @property
    def doubt_level(self) -> float:
        """The p-value of an objective up to which a test is doubtful."""
        return DOUBT / len(self.objectives)

    @property
    def cost_limits(self) -> tuple[float, float]:
        """Cost ratios that the candidate may have before it gets all requests, and at any time."""
        accepted = self.accept_cost or COST_LIMIT
        return accepted, max(COST_ROLLBACK, accepted)
