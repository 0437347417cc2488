"""Tenant accounts for rate limits and budgets: limits, token buckets and one process's ledger.
Pure.

Money is counted in billionths ("nanos") of the operator's currency, as integers, so that sums are
exact. A token bucket holds the limit of one minute and refills continuously. A charge may make it
negative: a request that uses more than it reserved is not cut off, but its tenant waits longer.
redis_scripts.py implements the same rules in Lua for Redis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.units import NANOS

if TYPE_CHECKING:
    from triolet.tenants.plans import Plan, Prices


MILLION: Final = 1_000_000
DAY_S: Final = 86_400


class Limit(StrEnum):
    """A plan's limits, as named in metrics and refusals."""

    BUDGET = "budget"
    CONCURRENT = "concurrent"
    REQUESTS = "requests"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of one tenant; None means unlimited.

    Attributes:
      requests: requests per minute.
      tokens: tokens per minute.
      concurrent: requests in flight.
      budget: budget per calendar month [nanos].
    """

    requests: float | None = None
    tokens: float | None = None
    concurrent: int | None = None
    budget: int | None = None

    @property
    def are_any(self) -> bool:
        """Whether the tenant has any limit."""
        return self != TenantLimits()

    def shared_by(self, count: int) -> TenantLimits:
        """Return one server's part: each limit / `count`, but at least one request at a time. The
        budget is not divided, because all servers read the same spend."""
        if count == 1:
            return self
        return TenantLimits(
            None if self.requests is None else self.requests / count,
            None if self.tokens is None else self.tokens / count,
            None if self.concurrent is None else max(1, self.concurrent // count),
            self.budget,
        )


def limits_of(plan: Plan) -> TenantLimits:
    """Return the limits of a plan."""
    return TenantLimits(
        plan.requests_per_minute,
        plan.tokens_per_minute,
        plan.max_concurrent,
        None if plan.budget is None else round(plan.budget * NANOS),
    )


def cost_of(prices: Prices, prompt: int, cached: int, completion: int) -> int:
    """Return the cost of tokens [nanos].

    Args:
      prices: the model's prices.
      prompt: all prompt tokens.
      cached: prompt tokens found in the prefix cache.
      completion: tokens generated.
    """
    per_million = (
        (prompt - cached) * prices.prompt
        + cached * prices.cached_prompt
        + completion * prices.completion
    )
    return round(per_million * (NANOS / MILLION))


@dataclass(frozen=True, slots=True)
class QuotaAsk:
    """A reservation that a client's request needs.

    Attributes:
      id: unique id.
      tenant: the request's tenant.
      tokens: expected prompt and completion tokens.
      cost: expected cost [nanos].
      once_id: see `Settlement`.
    """

    id: str
    tenant: str
    tokens: int
    cost: int = 0
    once_id: str = ""


@dataclass(frozen=True, slots=True)
class Settlement:
    """What an ended request used.

    Attributes:
      id: the reservation's id.
      tenant: the request's tenant.
      limits: the tenant's limits.
      tokens: tokens used.
      cost: cost of these tokens [nanos].
      is_begun: a worker was asked to compute it; otherwise it does not count as a request.
      once_id: id of work that may be computed several times, perhaps on several servers; empty for
        other work. The month is charged only for the largest computation; limits per minute count
        each. The server chooses it, because clients could otherwise reuse an id to compute for
        free.
    """

    id: str
    tenant: str
    limits: TenantLimits
    tokens: int
    cost: int
    is_begun: bool = True
    once_id: str = ""


@dataclass(frozen=True, slots=True)
class Account:
    """The state of a tenant's limits at one moment.

    Attributes:
      requests: level of the request bucket; below zero is a debt; 0 without a limit.
      tokens: level of the token bucket, likewise.
      in_flight: requests that are not settled.
      spent: spending this month [nanos].
      used_tokens: tokens used this month.
    """

    requests: float
    tokens: float
    in_flight: int
    spent: int
    used_tokens: int


@dataclass(frozen=True, slots=True)
class QuotaVerdict:
    """The answer to a `QuotaAsk`.

    Attributes:
      account: the account after the reservation.
      refused_by: the limit that refuses the request; None if it is accepted.
      wait_s: time after which no limit would refuse it, if no other requests come; 0 if unknown.
    """

    account: Account
    refused_by: Limit | None = None
    wait_s: float = 0.0


def month_of(seconds: float) -> str:
    """Return the calendar month (UTC) of a Unix time, such as 2031-07."""
    return _month_of_day(int(seconds // DAY_S))


@lru_cache(maxsize=8)
def _month_of_day(day: int) -> str:
    """Return the calendar month of a day since 1970. Cached: a request needs it four times."""
    return datetime.fromtimestamp(day * DAY_S, UTC).strftime("%Y-%m")


MINUTE_S: Final = 60.0
GRAIN: Final = 1e-6
"""Tolerance for sums of floats, in requests or tokens, so that a client that waits exactly
`Retry-After` is accepted."""


@dataclass(slots=True)
class Bucket:
    """The bucket of one limit. Without a limit (None) nothing is charged.

    Attributes:
      level: level at the time `at`; below zero is a debt. A bucket that was never charged is full.
      at: time of `level` [s].
    """

    level: float = math.inf
    at: float = 0.0

    def level_at(self, limit: float | None, now: float) -> float:
        """Return the level now, at most `limit`."""
        if limit is None:
            return 0.0
        elapsed_s = max(0.0, now - self.at)
        return min(limit, self.level + elapsed_s * limit / MINUTE_S)

    def charge(self, amount: float, limit: float | None, now: float) -> None:
        """Subtract `amount`; the level may fall below zero."""
        if limit is not None:
            self.level = self.level_at(limit, now) - amount
            self.at = max(now, self.at)

    def refund(self, amount: float) -> None:
        """Add `amount`; `level_at` caps the level at the limit."""
        self.level += amount

    def wait_s(self, amount: float, limit: float | None, now: float) -> float:
        """Return the time until the level reaches `amount`, or is full if `amount` exceeds the
        limit; 0 if it is reached already."""
        if limit is None:
            return 0.0
        missing = min(amount, limit) - GRAIN - self.level_at(limit, now)
        return max(0.0, missing * MINUTE_S / limit)


@dataclass(slots=True)
class AccountEntry:
    """One tenant's account.

    Attributes:
      requests: bucket of requests per minute.
      tokens: bucket of tokens per minute.
      in_flight: requests that are not settled.
      held: expected cost of these requests [nanos].
      month: the month of `spent` and `used_tokens`.
      spent: settled cost [nanos].
      used_tokens: settled tokens.
    """

    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    in_flight: int = 0
    held: int = 0
    month: str = ""
    spent: int = 0
    used_tokens: int = 0

    def account(self, limits: TenantLimits, now: float) -> Account:
        """Return the state of the limits."""
        return Account(
            self.requests.level_at(limits.requests, now),
            self.tokens.level_at(limits.tokens, now),
            self.in_flight,
            self.spent,
            self.used_tokens,
        )

    def charge(self, requests: float, tokens: float, limits: TenantLimits, now: float) -> None:
        """Charge both buckets."""
        self.requests.charge(requests, limits.requests, now)
        self.tokens.charge(tokens, limits.tokens, now)


class Held(NamedTuple):
    """An unsettled reservation, and the limits when it was charged."""

    ask: QuotaAsk
    limits: TenantLimits


class Ledger:
    """Accounts and unsettled reservations; at most one account per tenant of the tenants file.

    Attributes:
      held: reservations by id.
    """

    def __init__(self) -> None:
        self._entries: dict[str, AccountEntry] = {}
        self.held: dict[str, Held] = {}

    def entry(self, tenant: str, month: str) -> AccountEntry:
        """Return a tenant's account for this month."""
        entry = self._entries.setdefault(tenant, AccountEntry())
        if month != entry.month:
            entry.month, entry.spent, entry.used_tokens = month, 0, 0
        return entry

    def reserve(self, ask: QuotaAsk, limits: TenantLimits, month: str, now: float) -> QuotaVerdict:
        """Reserve the expected use of a request, or refuse it and change nothing."""
        entry = self.entry(ask.tenant, month)
        refused_by, wait_s = _objection(entry, ask, limits, now)
        if refused_by is None:
            entry.charge(1, ask.tokens, limits, now)
            self.held[ask.id] = Held(ask, limits)
            entry.in_flight += 1
            entry.held += ask.cost
        return QuotaVerdict(entry.account(limits, now), refused_by, wait_s)

    def settle(self, settlement: Settlement, limits: TenantLimits, month: str, now: float) -> None:
        """Replace the reservation, if there is one, by the actual use."""
        entry = self.entry(settlement.tenant, month)
        held = self.held.pop(settlement.id, None)
        if held is not None:
            entry.in_flight -= 1
            entry.held -= held.ask.cost
            # Do not refund to a limit that did not exist when the reservation was charged.
            if held.limits.tokens is not None:
                entry.tokens.refund(held.ask.tokens)
            if held.limits.requests is not None:
                entry.requests.refund(1)
        entry.charge(settlement.is_begun, settlement.tokens, limits, now)
        entry.spent += settlement.cost
        entry.used_tokens += settlement.tokens


def _objection(
    entry: AccountEntry, ask: QuotaAsk, limits: TenantLimits, now: float
) -> tuple[Limit | None, float]:
    """Return the limit that refuses a request, and the wait [s]."""
    if limits.budget is not None and entry.spent + entry.held >= limits.budget:
        return Limit.BUDGET, 0.0
    if limits.concurrent is not None and entry.in_flight >= limits.concurrent:
        return Limit.CONCURRENT, 0.0
    wait_s = {
        Limit.REQUESTS: entry.requests.wait_s(1, limits.requests, now),
        Limit.TOKENS: entry.tokens.wait_s(ask.tokens, limits.tokens, now),
    }
    worst = max(wait_s, key=wait_s.__getitem__)
    return (worst, wait_s[worst]) if wait_s[worst] > 0 else (None, 0.0)
