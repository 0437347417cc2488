"""What keeps the accounts, seen from whoever asks: in this process, or in Redis for several.

Knows shapes only. tests/server/tenants holds both to the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

if TYPE_CHECKING:
    from .accounts import Account, Ask, Limits, Settlement, Verdict


class SpendObserver(Protocol):
    """Told what the accounts become, and how their store is."""

    def spent(self, tenant: str, before: int, after: int) -> None:
        """A tenant has spent more, in nanos this month. Of all servers one is told of each."""
        ...

    def store_changed(self, *, is_shared: bool) -> None:
        """Limits hold for all servers together again, or only for each by itself."""
        ...

    def call_failed(self, reason: str) -> None:
        """The shared store did not do what it was asked."""
        ...


class Store(Protocol):
    """Accounts of all tenants."""

    @property
    def is_well(self) -> bool:
        """Whether the limits hold for everybody who should share them."""
        ...

    @property
    def num_servers(self) -> int:
        """Servers that share the limits, this one included, as far as is known."""
        ...

    @property
    def num_reserved(self) -> int:
        """Requests of this server that are not settled."""
        ...

    async def reserve(self, ask: Ask, limits: Limits) -> Verdict:
        """Take what a request will probably use, or nothing. Bounded in time, never fails."""
        ...

    def settle(self, settlement: Settlement) -> None:
        """Charge what it used instead. Never waits, never fails; once per reservation."""
        ...

    def last_seen(
        self, tenant: str, limits: Limits, within_s: float | None = None
    ) -> Account | None:
        """Return an account as far as it is known here, as if nobody had touched it since; None if
        nothing is known, or only what is older than so much."""
        ...

    def enforced(self, limits: Limits) -> Limits:
        """Return what of these limits this server holds a tenant to."""
        ...

    async def account(self, tenant: str, limits: Limits) -> Account:
        """Return an account as it is. Bounded in time, never fails."""
        ...

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the accounts until cancelled; then write down what is not yet."""
        ...
