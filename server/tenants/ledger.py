"""The accounts of all tenants in one process.

Pure: time and month are handed in. Knows no store; memory_store.py keeps one for good, and
redis_store.py one for the time in which Redis is away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .amounts import Account, Limit, Verdict
from .buckets import Bucket

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .amounts import Ask, Limits, Settlement


@dataclass(slots=True)
class Entry:
    """One tenant's account.

    Attributes:
      requests: None as long as nobody took any.
      tokens: likewise.
      in_flight: requests that are not settled.
      held: what these will probably cost, in nanos.
      month: of the next two.
      spent: in nanos.
      used_tokens: settled ones.
    """

    requests: Bucket | None = None
    tokens: Bucket | None = None
    in_flight: int = 0
    held: int = 0
    month: str = ""
    spent: int = 0
    used_tokens: int = 0

    def turn_to(self, month: str) -> None:
        """Begin a month if it is another one."""
        if month != self.month:
            self.month, self.spent, self.used_tokens = month, 0, 0

    def account(self, limits: Limits, now: float) -> Account:
        """Return what there is."""
        return Account(
            _level(self.requests, limits.requests, now),
            _level(self.tokens, limits.tokens, now),
            self.in_flight,
            self.spent,
            self.used_tokens,
        )

    def charge(self, requests: float, tokens: float, limits: Limits, now: float) -> None:
        """Take from both buckets."""
        self.requests = _charged(self.requests, requests, limits.requests, now)
        self.tokens = _charged(self.tokens, tokens, limits.tokens, now)


def _level(bucket: Bucket | None, limit: float | None, now: float) -> float:
    if limit is None:
        return 0.0
    return limit if bucket is None else bucket.level_at(limit, now)


def _charged(
    bucket: Bucket | None, amount: float, limit: float | None, now: float
) -> Bucket | None:
    if limit is None:
        return bucket
    bucket = bucket or Bucket(limit, now)
    bucket.charge(amount, limit, now)
    return bucket


class Ledger:
    """Accounts and what is reserved. The operator's tenants are all there can be."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._held: dict[str, Ask] = {}
        self._charged_by: dict[str, Limits] = {}

    def __contains__(self, ask_id: str) -> bool:
        return ask_id in self._held

    def __iter__(self) -> Iterator[tuple[str, Entry]]:
        return iter(self._entries.items())

    @property
    def held(self) -> dict[str, Ask]:
        """What is reserved and not settled."""
        return self._held

    def entry(self, tenant: str, month: str) -> Entry:
        """Return a tenant's account, in the present month."""
        entry = self._entries.setdefault(tenant, Entry())
        entry.turn_to(month)
        return entry

    def reserve(self, ask: Ask, limits: Limits, month: str, now: float) -> Verdict:
        """Take what a request will probably use, or nothing."""
        entry = self.entry(ask.tenant, month)
        refused_by, wait_s = _objection(entry, ask, limits, now)
        if refused_by is None:
            entry.charge(1, ask.tokens, limits, now)
            self._hold(ask, entry, limits)
        return Verdict(entry.account(limits, now), refused_by, wait_s)

    def settle(self, settlement: Settlement, limits: Limits, month: str, now: float) -> None:
        """Charge what was used instead of what was reserved, if anything was."""
        entry = self.entry(settlement.tenant, month)
        ask = self._held.pop(settlement.id, None)
        if ask is not None:
            entry.in_flight -= 1
            entry.held -= ask.cost
            charged_by = self._charged_by.pop(ask.id)
            if charged_by.tokens is not None:
                _refund(entry.tokens, ask.tokens)
            if charged_by.requests is not None:
                _refund(entry.requests, 1)
        entry.charge(settlement.is_begun, settlement.tokens, limits, now)
        entry.spent += settlement.cost
        entry.used_tokens += settlement.tokens

    def account(self, tenant: str, limits: Limits, month: str, now: float) -> Account:
        """Return what there is of a tenant's limits, without touching anything."""
        entry = self._entries.get(tenant) or Entry(month=month)
        entry.turn_to(month)
        return entry.account(limits, now)

    def clear(self) -> None:
        """Forget all of it."""
        self._entries.clear()
        self._held.clear()
        self._charged_by.clear()

    def _hold(self, ask: Ask, entry: Entry, limits: Limits) -> None:
        self._held[ask.id] = ask
        self._charged_by[ask.id] = limits
        entry.in_flight += 1
        entry.held += ask.cost


def _refund(bucket: Bucket | None, amount: float) -> None:
    if bucket is not None:
        bucket.refund(amount)


def _objection(entry: Entry, ask: Ask, limits: Limits, now: float) -> tuple[Limit | None, float]:
    """Return the limit that a request meets, and for how long."""
    if limits.budget is not None and entry.spent + entry.held >= limits.budget:
        return Limit.BUDGET, 0.0
    if limits.concurrent is not None and entry.in_flight >= limits.concurrent:
        return Limit.CONCURRENT, 0.0
    wait_s = {
        Limit.REQUESTS: _wait_s(entry.requests, 1, limits.requests, now),
        Limit.TOKENS: _wait_s(entry.tokens, ask.tokens, limits.tokens, now),
    }
    worst = max(wait_s, key=wait_s.__getitem__)
    return (worst, wait_s[worst]) if wait_s[worst] > 0 else (None, 0.0)


def _wait_s(bucket: Bucket | None, amount: float, limit: float | None, now: float) -> float:
    """Whoever wants more than a full bucket holds gets a full one, and the rest is a debt."""
    if limit is None or bucket is None:
        return 0.0
    return bucket.wait_s(min(amount, limit), limit, now)
