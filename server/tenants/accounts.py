"""Accounts of tenants: limits, token buckets, the ledger of one process. Pure.

Money is counted in thousand-millionths of the operator's currency, as whole numbers, so that sums
are exact. A token bucket holds one minute's worth and is refilled all the time. A charge may drive
it below zero: a request that used more than was reserved is not cut, its tenant waits longer.
redis_calls.py has the same rules in Redis' own language.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

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
        """Whether there is a limit."""
        return self != Limits()

    def shared_by(self, count: int) -> Limits:
        """Return one server's part of them. One request at a time always passes; the budget is not
        divided, because the servers know what was spent."""
        if count == 1:
            return self
        return Limits(
            None if self.requests is None else self.requests / count,
            None if self.tokens is None else self.tokens / count,
            None if self.concurrent is None else max(1, self.concurrent // count),
            self.budget,
        )


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
      cached: those of them with KV from before.
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
      tenant: of the request.
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
      tenant: of the request.
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
      wait_s: after which it would have met none, without other requests; 0 if unknown.
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


MINUTE_S: Final = 60.0
GRAIN: Final = 1e-6
"""Of a request, or of a token: the error of sums of floats. A client that waited as long as told
shall not lack a thousand-millionth."""


@dataclass(slots=True)
class Bucket:
    """What is left of one limit. Without a limit (None) nothing is taken and nothing is left.

    Attributes:
      level: that was there at `at`; below zero is a debt. A bucket that was never charged is full.
      at: when.
    """

    level: float = math.inf
    at: float = 0.0

    def level_at(self, limit: float | None, now: float) -> float:
        """Return what is there now, at most a minute's worth."""
        if limit is None:
            return 0.0
        elapsed_s = max(0.0, now - self.at)
        return min(limit, self.level + elapsed_s * limit / MINUTE_S)

    def charge(self, amount: float, limit: float | None, now: float) -> None:
        """Take something out, whether it is there or not."""
        if limit is not None:
            self.level = self.level_at(limit, now) - amount
            self.at = max(now, self.at)

    def refund(self, amount: float) -> None:
        """Give something back. What would run over runs over when the level is next looked at."""
        self.level += amount

    def wait_s(self, amount: float, limit: float | None, now: float) -> float:
        """Return after how long so much will be there, if nothing is taken; 0 if it is. Of more
        than a full bucket holds, the rest is a debt."""
        if limit is None:
            return 0.0
        missing = min(amount, limit) - GRAIN - self.level_at(limit, now)
        return max(0.0, missing * MINUTE_S / limit)


@dataclass(slots=True)
class Entry:
    """One tenant's account.

    Attributes:
      requests: of this minute.
      tokens: likewise.
      in_flight: requests that are not settled.
      held: what these will probably cost, in nanos.
      month: of the next two.
      spent: in nanos.
      used_tokens: settled ones.
    """

    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    in_flight: int = 0
    held: int = 0
    month: str = ""
    spent: int = 0
    used_tokens: int = 0

    def account(self, limits: Limits, now: float) -> Account:
        """Return what there is."""
        return Account(
            self.requests.level_at(limits.requests, now),
            self.tokens.level_at(limits.tokens, now),
            self.in_flight,
            self.spent,
            self.used_tokens,
        )

    def charge(self, requests: float, tokens: float, limits: Limits, now: float) -> None:
        """Take from both buckets."""
        self.requests.charge(requests, limits.requests, now)
        self.tokens.charge(tokens, limits.tokens, now)


class Held(NamedTuple):
    """What is reserved and not settled, and the limits that it was charged by."""

    ask: Ask
    limits: Limits


class Ledger:
    """Accounts and what is reserved. The operator's tenants are all there can be.

    Attributes:
      held: by the id of the ask.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self.held: dict[str, Held] = {}

    def entry(self, tenant: str, month: str) -> Entry:
        """Return a tenant's account, in the present month."""
        entry = self._entries.setdefault(tenant, Entry())
        if month != entry.month:
            entry.month, entry.spent, entry.used_tokens = month, 0, 0
        return entry

    def reserve(self, ask: Ask, limits: Limits, month: str, now: float) -> Verdict:
        """Take what a request will probably use, or nothing."""
        entry = self.entry(ask.tenant, month)
        refused_by, wait_s = _objection(entry, ask, limits, now)
        if refused_by is None:
            entry.charge(1, ask.tokens, limits, now)
            self.held[ask.id] = Held(ask, limits)
            entry.in_flight += 1
            entry.held += ask.cost
        return Verdict(entry.account(limits, now), refused_by, wait_s)

    def settle(self, settlement: Settlement, limits: Limits, month: str, now: float) -> None:
        """Charge what was used instead of what was reserved, if anything was."""
        entry = self.entry(settlement.tenant, month)
        held = self.held.pop(settlement.id, None)
        if held is not None:
            entry.in_flight -= 1
            entry.held -= held.ask.cost
            # What no limit was charged for is not given back to one that came later.
            if held.limits.tokens is not None:
                entry.tokens.refund(held.ask.tokens)
            if held.limits.requests is not None:
                entry.requests.refund(1)
        entry.charge(settlement.is_begun, settlement.tokens, limits, now)
        entry.spent += settlement.cost
        entry.used_tokens += settlement.tokens


def _objection(entry: Entry, ask: Ask, limits: Limits, now: float) -> tuple[Limit | None, float]:
    """Return the limit that a request meets, and for how long."""
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
