"""What is asked of an account, and what it says: the words of all stores.

Pure data. Money is counted in thousand-millionths of the operator's currency, as whole numbers, so
that sums are exact wherever they are added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from triolet.tenants import Plan, Prices

NANOS: Final = 1_000_000_000
MILLION: Final = 1_000_000
DAY_S: Final = 86_400


class Limit(StrEnum):
    """Which one was met."""

    BUDGET = "budget"
    CONCURRENT = "concurrent"
    REQUESTS = "requests"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one tenant; None means none.

    Attributes:
      requests: per minute.
      tokens: per minute.
      concurrent: requests in flight.
      budget: per calendar month, in nanos.
    """

    requests: float | None = None
    tokens: float | None = None
    concurrent: int | None = None
    budget: int | None = None

    @property
    def are_any(self) -> bool:
        """Whether somebody has to be asked."""
        return self != _NO_LIMITS

    def shared_by(self, count: int) -> Limits:
        """Return one server's part of them. One request at a time everybody may have; the budget is
        not divided, because what is spent is known to all."""
        if count == 1:
            return self
        return Limits(
            None if self.requests is None else self.requests / count,
            None if self.tokens is None else self.tokens / count,
            None if self.concurrent is None else max(1, self.concurrent // count),
            self.budget,
        )


_NO_LIMITS: Final = Limits()


def limits_of(plan: Plan) -> Limits:
    """Return what a plan allows."""
    return Limits(
        plan.requests_per_minute,
        plan.tokens_per_minute,
        plan.max_concurrent,
        None if plan.budget is None else round(plan.budget * NANOS),
    )


def cost_of(prices: Prices, prompt: int, cached: int, completion: int) -> int:
    """Return what tokens cost, in nanos.

    Args:
      prices: of the model.
      prompt: all tokens of the prompt.
      cached: those of them whose KV was there already.
      completion: tokens generated.
    """
    per_million = (
        (prompt - cached) * prices.prompt
        + cached * prices.cached_prompt
        + completion * prices.completion
    )
    return round(per_million * (NANOS / MILLION))


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request of a client's would take.

    Attributes:
      id: no other one has it.
      tenant: whose it is.
      tokens: that it will probably use.
      cost: of these, in nanos.
    """

    id: str
    tenant: str
    tokens: int
    cost: int = 0


@dataclass(frozen=True, slots=True)
class Settlement:
    """What became of it.

    Attributes:
      id: of the Ask.
      tenant: whose it was.
      limits: of the tenant.
      tokens: that it used.
      cost: of these, in nanos.
      is_begun: whether anything was begun; if not, it does not count as a request either.
    """

    id: str
    tenant: str
    limits: Limits
    tokens: int
    cost: int
    is_begun: bool = True


@dataclass(frozen=True, slots=True)
class Account:
    """What there is of a tenant's limits, at one moment.

    Attributes:
      requests: left of this minute's; may be below zero. Full where there is no limit.
      tokens: likewise.
      in_flight: requests that are not settled.
      spent: this month, in nanos.
      used_tokens: this month.
    """

    requests: float
    tokens: float
    in_flight: int
    spent: int
    used_tokens: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a request may go on.

    Attributes:
      account: after that.
      refused_by: the limit that it met; None if it may.
      wait_s: after which it would have met none, if nobody else had come; 0 if nobody knows.
    """

    account: Account
    refused_by: Limit | None = None
    wait_s: float = 0.0


def month_of(seconds: float) -> str:
    """Return the calendar month (UTC) of a time of day, such as 2031-07."""
    return _month_of_day(int(seconds // DAY_S))


@lru_cache(maxsize=8)
def _month_of_day(day: int) -> str:
    """Return the same for days since 1970; a request asks four times."""
    return datetime.fromtimestamp(day * DAY_S, UTC).strftime("%Y-%m")
