"""Who watches a store in tests."""

from __future__ import annotations


class RecordingObserver:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.spends: list[tuple[str, int, int]] = []
        self.is_shared: bool | None = None
        self.failures: list[str] = []

    def spent(self, tenant: str, before: int, after: int) -> None:
        """A tenant has spent more."""
        self.spends.append((tenant, before, after))

    def store_changed(self, *, is_shared: bool) -> None:
        """Limits are shared, or local."""
        self.is_shared = is_shared

    def call_failed(self, reason: str) -> None:
        """A call failed."""
        self.failures.append(reason)
