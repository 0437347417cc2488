"""What one server goes by while Redis is away: its part of each limit, and what it owes afterwards.

Pure. A tenant's buckets begin with this server's part of what was left when they were last seen.
Beside each runs one that nobody takes from; by as much as the real one is behind that one in the
end, the shared one is charged. So what was used minutes ago, and would be refilled by now, is no
debt, and what was used just now is one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from .accounts import Bucket, Ledger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .accounts import Account, Ask, Limits, Settlement, Verdict


@dataclass(slots=True)
class Start:
    """How a tenant's local account began.

    Attributes:
      limits: the whole ones.
      part: of them, this server's.
      requests: the bucket that nobody takes from; None where there is no limit.
      tokens: likewise.
      spent: by then, this month, as far as anybody knew.
      cost: spent since, in nanos.
      used_tokens: since.
    """

    limits: Limits
    part: Limits
    requests: Bucket | None
    tokens: Bucket | None
    spent: int
    cost: int = 0
    used_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Debt:
    """What a tenant took here, as the shared account has to be charged."""

    tenant: str
    limits: Limits
    requests: float
    tokens: float
    cost: int
    used_tokens: int


class LocalShare:
    """Accounts of the tenants that came meanwhile."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._starts: dict[str, Start] = {}

    def __contains__(self, ask_id: str) -> bool:
        return ask_id in self._ledger

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def held(self) -> dict[str, Ask]:
        """What is reserved here and not settled."""
        return self._ledger.held

    def knows(self, tenant: str) -> bool:
        """Return whether a tenant has an account here."""
        return tenant in self._starts

    def begin(
        self,
        tenant: str,
        limits: Limits,
        servers: int,
        seen: Account | None,
        in_flight: int,
        month: str,
        now: float,
    ) -> None:
        """Open an account.

        Args:
          tenant: whose.
          limits: the whole ones.
          servers: that share them.
          seen: what was left lately, as far as anybody knows.
          in_flight: requests of this server's.
          month: the present one.
          now: the present.
        """
        spent = 0 if seen is None else seen.spent
        part = _part(limits, servers, spent)
        entry = self._ledger.entry(tenant, month)
        entry.in_flight = in_flight
        if seen is not None:
            entry.spent, entry.used_tokens = seen.spent, seen.used_tokens
        levels = (part.requests, part.tokens)
        if seen is not None:
            levels = (
                None if part.requests is None else seen.requests / servers,
                None if part.tokens is None else seen.tokens / servers,
            )
        entry.requests, entry.tokens = (None if v is None else Bucket(v, now) for v in levels)
        requests, tokens = (None if v is None else Bucket(v, now) for v in levels)
        self._starts[tenant] = Start(limits, part, requests, tokens, spent)

    def renew(self, tenant: str, limits: Limits, servers: int) -> None:
        """Hold a tenant with an account to other limits from now on, if they have changed."""
        start = self._starts[tenant]
        if limits != start.limits:
            start.limits, start.part = limits, _part(limits, servers, start.spent)

    def limits_of(self, tenant: str) -> Limits:
        """Return the whole limits of a tenant with an account."""
        return self._starts[tenant].limits

    def reserve(self, ask: Ask, month: str, now: float) -> Verdict:
        """Take what a request of a tenant with an account will probably use, or nothing."""
        return self._ledger.reserve(ask, self._starts[ask.tenant].part, month, now)

    def settle(self, settlement: Settlement, month: str, now: float) -> None:
        """Charge what it used."""
        start = self._starts[settlement.tenant]
        start.cost += settlement.cost
        start.used_tokens += settlement.tokens
        self._ledger.settle(settlement, start.part, month, now)

    def left(self, tenant: str, month: str) -> None:
        """A request has ended that was reserved before the account was opened."""
        if tenant in self._starts:
            entry = self._ledger.entry(tenant, month)
            entry.in_flight = max(0, entry.in_flight - 1)

    def account(self, tenant: str, month: str, now: float) -> Account:
        """Return what there is of this server's part."""
        return self._ledger.account(tenant, self._starts[tenant].part, month, now)

    def debts(self, month: str, now: float) -> Iterator[Debt]:
        """Return what the shared accounts have to be charged."""
        for tenant, start in self._starts.items():
            entry = self._ledger.entry(tenant, month)
            yield Debt(
                tenant,
                start.limits,
                _behind(entry.requests, start.requests, start.part.requests, now),
                _behind(entry.tokens, start.tokens, start.part.tokens, now),
                start.cost,
                start.used_tokens,
            )

    def clear(self) -> None:
        """Close all accounts."""
        self._ledger.clear()
        self._starts.clear()


def _part(limits: Limits, servers: int, spent: int) -> Limits:
    """Return one server's part. Of the budget it is one of what is left: nobody hears what the
    others spend."""
    part = limits.shared_by(servers)
    if limits.budget is None:
        return part
    return replace(part, budget=spent + max(0, limits.budget - spent) // servers)


def _behind(
    bucket: Bucket | None, untouched: Bucket | None, limit: float | None, now: float
) -> float:
    if bucket is None or untouched is None or limit is None:
        return 0.0
    return max(0.0, untouched.level_at(limit, now) - bucket.level_at(limit, now))


class Batch(NamedTuple):
    """Changes that travel together."""

    number: int
    changes: str


class Journal:
    """What has to be told. Holds at most one change for each request in flight and a few for each
    tenant, because nothing else makes any.

    Args:
      max_batch: changes in one batch.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._changes: deque[dict[str, Any]] = deque()
        self._sending: Batch | None = None
        self._number = 0

    def __len__(self) -> int:
        return len(self._changes) + (self._sending is not None)

    def settle(self, settlement: Settlement) -> None:
        """Charge what was used, instead of what was reserved."""
        self._changes.append(
            {
                "kind": "settle",
                "id": settlement.id,
                "tenant": settlement.tenant,
                "requests": int(settlement.is_begun),
                "tokens": settlement.tokens,
                "cost": settlement.cost,
                **_limits(settlement.limits),
            }
        )

    def void(self, ask_id: str) -> None:
        """Give back a reservation, if there is one."""
        self._changes.append({"kind": "void", "id": ask_id})

    def adopt(self, ask: Ask, limits: Limits) -> None:
        """Count a request as in flight that was reserved elsewhere, under these limits."""
        self._changes.append(
            {
                "kind": "adopt",
                "id": ask.id,
                "tenant": ask.tenant,
                "tokens": ask.tokens,
                "cost": ask.cost,
                **_limits(limits),
            }
        )

    def owe(self, debt: Debt) -> None:
        """Charge what was taken elsewhere."""
        self._changes.append(
            {
                "kind": "debt",
                "tenant": debt.tenant,
                "requests": debt.requests,
                "tokens": debt.tokens,
                "cost": debt.cost,
                "used_tokens": debt.used_tokens,
                **_limits(debt.limits),
            }
        )

    def next_batch(self) -> Batch | None:
        """Return what is to be sent now: the batch that is not answered yet, or the next."""
        if self._sending is None and self._changes:
            count = min(self._max_batch, len(self._changes))
            changes = [self._changes.popleft() for _ in range(count)]
            self._number += 1
            self._sending = Batch(self._number, msgspec.json.encode(changes).decode())
        return self._sending

    def answered(self) -> None:
        """The batch is done."""
        self._sending = None


def _limits(limits: Limits) -> dict[str, float]:
    return {
        "request_limit": -1 if limits.requests is None else limits.requests,
        "token_limit": -1 if limits.tokens is None else limits.tokens,
    }
