"""An observer of stores that records what it is told."""

from __future__ import annotations

from server.tenants.memory_store import QuotaObserver, SpendWatch


class RecordingObserver(SpendWatch):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__(QuotaObserver())
        self.spends: list[tuple[str, int, int]] = []
        self.failures: list[str] = []

    def spent(self, tenant: str, before: int, after: int) -> None:
        """A tenant has spent more."""
        self.spends.append((tenant, before, after))

    def call_failed(self, reason: str) -> None:
        """A call failed."""
        self.failures.append(reason)
