"""A fake observer of account stores for tests, which records its calls."""

from __future__ import annotations

from server.tenants.memory_store import QuotaObserver, SpendWatch


class RecordingObserver(SpendWatch):
    """Records its calls."""

    def __init__(self) -> None:
        super().__init__(QuotaObserver())
        self.spends: list[tuple[str, int, int]] = []
        self.failures: list[str] = []

    def spent(self, tenant: str, before: int, after: int) -> None:
        """Record a tenant's spending."""
        self.spends.append((tenant, before, after))

    def call_failed(self, reason: str) -> None:
        """Record a failed call."""
        self.failures.append(reason)
