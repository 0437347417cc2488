"""What one server goes by while Redis is away: its part of each limit, and what it reports then.

Pure. Rate limits begin anew, with this server's full part of a minute. When Redis is back it is
told one sum for each tenant: what was spent, and what is lacking in the buckets here. Requests that
are not settled by then are reserved there.
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
      limits: the whole ones.
      servers: that shared them when the account was opened. The buckets here are filled for so
        many, so it stays until the account is closed.
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
        """One server's part. Of the budget it is one of what was left: no server sees what the
        others spend."""
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
        """What is reserved here and not settled."""
        return self._ledger.held

    def open(
        self, tenant: str, limits: Limits, servers: int, seen: Account | None, month: str
    ) -> None:
        """Open an account, or hold the one there is to these limits from now on.

        Args:
          tenant: of the account.
          limits: the whole ones.
          servers: that share them.
          seen: the shared account as it was last seen.
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
        """Take what a request of a tenant with an account will probably use, or nothing."""
        return self._ledger.reserve(ask, self.opened[ask.tenant].part, month, now)

    def settle(self, settlement: Settlement, month: str, now: float) -> None:
        """Charge what it used."""
        opened = self.opened[settlement.tenant]
        opened.cost += settlement.cost
        opened.used_tokens += settlement.tokens
        self._ledger.settle(settlement, opened.part, month, now)

    def account(self, tenant: str, month: str, now: float) -> Account:
        """Return what there is of this server's part."""
        return self._ledger.entry(tenant, month).account(self.opened[tenant].part, now)

    def report(self, journal: Journal, month: str, now: float) -> None:
        """Write down what the shared accounts have to learn. Of rates that is what the buckets
        here, full at first, lack by now: what was taken and is not refilled yet."""
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

    def owe(self, tenant: str, opened: Opened, requests: float, tokens: float) -> None:
        """Charge what was taken elsewhere: these of the rates, and all that was spent."""
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
