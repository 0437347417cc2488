"""Local accounts while Redis is away: this server's part of each limit, and the report afterwards.

Pure. Rate limits begin anew, with this server's full part of a minute. When Redis is back it gets
one sum for each tenant: the spend, and the missing levels of the local buckets. Requests that are
not settled by then are reserved in Redis.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from .accounts import Ledger

if TYPE_CHECKING:
    from .accounts import Account, Ask, Held, Limits, Settlement, Verdict


@dataclass(slots=True)
class Opened:
    """A tenant's local account.

    Attributes:
      limits: of the tenant, undivided.
      servers: that shared them when the account was opened. Constant until it is closed, because
        the local buckets are filled for this number.
      spent_before: this month [nanos], as last seen when the account was opened.
      cost: spent since [nanos].
      used_tokens: since.
    """

    limits: Limits
    servers: int
    spent_before: int
    cost: int = 0
    used_tokens: int = 0

    @property
    def part(self) -> Limits:
        """One server's part. Of the budget: the rest at opening / servers, because no server sees
        the spend of the others."""
        part = self.limits.shared_by(self.servers)
        if part.budget is None:
            return part
        left = max(0, part.budget - self.spent_before)
        return replace(part, budget=self.spent_before + left // self.servers)


class LocalShare:
    """Accounts of the tenants with requests while Redis is away.

    Attributes:
      opened: by tenant.
    """

    def __init__(self) -> None:
        self._ledger = Ledger()
        self.opened: dict[str, Opened] = {}

    @property
    def held(self) -> dict[str, Held]:
        """Unsettled local reservations, by the id of the ask."""
        return self._ledger.held

    def open(
        self, tenant: str, limits: Limits, servers: int, seen: Account | None, month: str
    ) -> None:
        """Open an account, or set the limits of an open one.

        Args:
          tenant: of the account.
          limits: of the tenant, undivided.
          servers: that share them.
          seen: the shared account as last seen.
          month: the present one.
        """
        if (opened := self.opened.get(tenant)) is not None:
            opened.limits = limits
            return
        if seen is not None:
            entry = self._ledger.entry(tenant, month)
            entry.spent, entry.used_tokens = seen.spent, seen.used_tokens
        self.opened[tenant] = Opened(limits, servers, 0 if seen is None else seen.spent)

    def reserve(self, ask: Ask, month: str, now: float) -> Verdict:
        """Reserve the expected use of a request, or refuse it. The tenant's account is open."""
        return self._ledger.reserve(ask, self.opened[ask.tenant].part, month, now)

    def settle(self, settlement: Settlement, month: str, now: float) -> None:
        """Charge the use of a request."""
        opened = self.opened[settlement.tenant]
        opened.cost += settlement.cost
        opened.used_tokens += settlement.tokens
        self._ledger.settle(settlement, opened.part, month, now)

    def account(self, tenant: str, month: str, now: float) -> Account:
        """Return the state of this server's part."""
        return self._ledger.entry(tenant, month).account(self.opened[tenant].part, now)

    def report(self, journal: Journal, month: str, now: float) -> None:
        """Write the changes of the shared accounts. Of rates: `limit - level` of the local buckets,
        which were full at opening."""
        for tenant, opened in self.opened.items():
            part, left = opened.part, self.account(tenant, month, now)
            requests, tokens = (
                (part.requests or 0.0) - left.requests,
                (part.tokens or 0.0) - left.tokens,
            )
            journal.owe(tenant, opened, requests, tokens)
        for ask, _ in self.held.values():
            journal.adopt(ask, self.opened[ask.tenant].limits)

    def clear(self) -> None:
        """Close all accounts."""
        self._ledger = Ledger()
        self.opened.clear()


class Batch(NamedTuple):
    """Changes that are sent together."""

    number: int
    changes: str


class Journal:
    """Changes to send to Redis. Bounded: at most one for each request in flight and a few for each
    tenant.

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
        """Replace a reservation by the use."""
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
        """Release a reservation, if there is one."""
        self._changes.append({"kind": "void", "id": ask_id})

    def adopt(self, ask: Ask, limits: Limits) -> None:
        """Count a request as in flight that was reserved locally, under these limits."""
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

    def owe(self, tenant: str, opened: Opened, requests: float, tokens: float) -> None:
        """Charge the use of local accounts: `requests` and `tokens` of the rates, and the spend."""
        self._changes.append(
            {
                "kind": "debt",
                "tenant": tenant,
                "requests": requests,
                "tokens": tokens,
                "cost": opened.cost,
                "used_tokens": opened.used_tokens,
                **_limits(opened.limits),
            }
        )

    def next_batch(self) -> Batch | None:
        """Return the unanswered batch, or else the next one."""
        if self._sending is None and self._changes:
            count = min(self._max_batch, len(self._changes))
            changes = [self._changes.popleft() for _ in range(count)]
            self._number += 1
            self._sending = Batch(self._number, msgspec.json.encode(changes).decode())
        return self._sending

    def answered(self) -> None:
        """Drop the batch that was sent."""
        self._sending = None


def _limits(limits: Limits) -> dict[str, float]:
    return {
        "request_limit": -1 if limits.requests is None else limits.requests,
        "token_limit": -1 if limits.tokens is None else limits.tokens,
    }
