"""Forecast of a rollout: whether each step will meet enough users, from the last day's traffic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    from .plan import RolloutPlan

DAY_S: Final = 86_400.0
USUAL_SHARES: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Shares to propose. Above a half, the stable version would have too little to compare with."""


class RolloutForecast(NamedTuple):
    """Whether a rollout will meet enough users.

    Attributes:
      shares: the plan's shares, or larger ones with enough traffic; empty if there are none.
      said: the same for people, with the numbers.
    """

    shares: tuple[float, ...]
    said: str


def forecast(plan: RolloutPlan, daily_requests: Collection[int]) -> RolloutForecast:
    """Forecast a rollout, as if requests came evenly over the day.

    Args:
      plan: the plan.
      daily_requests: requests of each active bucket in the last 24 hours, without excluded tenants.
    """
    # Poisson arrivals: the chance that a bucket is active at all in the longest step.
    rate = plan.max_step_s / DAY_S
    active = math.fsum(-math.expm1(-requests * rate) for requests in daily_requests)
    # The heaviest user is on the candidate in few rollouts: count on the requests of the others.
    requests = (sum(daily_requests) - max(daily_requests, default=0)) * rate
    needed = 1.0
    if requests:
        needed = max(plan.min_buckets / active, plan.min_requests / requests)
    first = plan.shares[0]
    said = (
        f"a step of {first:.0%} needs about {plan.min_buckets / first:,.0f} active users and "
        f"{plan.min_requests / first:,.0f} requests within {plan.max_step_s:g} s; from the traffic "
        f"of a day, {active:,.0f} and {requests:,.0f} are expected"
    )
    if needed <= first:
        return RolloutForecast(plan.shares, said)
    least = next((share for share in USUAL_SHARES if share >= needed), None)
    if least is None:
        return RolloutForecast((), f"{said}: too few to compare versions at any share")
    shares = tuple(sorted({max(least, share) for share in plan.shares}))
    return RolloutForecast(shares, f"{said}; use {least:.0%}")
