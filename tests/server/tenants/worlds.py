"""Test helper that runs an account store, in memory or in Redis, and controls the time of its
accounts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import trio

from server.tenants.memory_store import MemoryStore
from server.tenants.redis_scripts import PREFIX
from server.tenants.redis_store import RedisStore
from triolet.config import QuotaConfig

from .fakes import RecordingObserver

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.tenants.accounts import Account, TenantLimits

    from .redis_server import RedisServer

PATIENCE_S = 60.0


def unhurried(url: str, **other: float) -> QuotaConfig:
    """Return a config with timeouts that no slow machine reaches, and short polling intervals."""
    return QuotaConfig(
        limits=url, call_timeout_s=30, connect_timeout_s=30, probe_s=0.02, heartbeat_s=0.05, **other
    )  # type: ignore[arg-type]


class World(ABC):
    """A running store."""

    def __init__(self, store: MemoryStore | RedisStore, observer: RecordingObserver) -> None:
        self.store = store
        self.observer = observer

    @abstractmethod
    def let_pass(self, tenant: str, seconds: float) -> None:
        """Advance time for a tenant's buckets."""

    async def until(
        self, tenant: str, limits: TenantLimits, is_so: Callable[[Account], bool]
    ) -> Account:
        """Wait until a tenant's account meets a condition, and return it."""
        with trio.fail_after(PATIENCE_S):
            while not is_so(account := await self.store.account(tenant, limits)):
                await trio.lowlevel.checkpoint()
        return account


class MemoryWorld(World):
    """Accounts in memory."""

    def __init__(self) -> None:
        self._now = 1000.0
        observer = RecordingObserver()
        super().__init__(MemoryStore(QuotaConfig(), observer, clock=lambda: self._now), observer)

    def let_pass(self, tenant: str, seconds: float) -> None:
        """Advance the clock."""
        self._now += seconds


class RedisWorld(World):
    """Accounts in Redis."""

    def __init__(self, redis: RedisServer, name: str = "a", **other: float) -> None:
        observer = RecordingObserver()
        super().__init__(RedisStore(unhurried(redis.url, **other), observer, name), observer)
        self._redis = redis

    def let_pass(self, tenant: str, seconds: float) -> None:
        """Change the stored times, because Redis's clock cannot be moved."""
        for field in ("ra", "ta"):
            key = f"{PREFIX}t:{tenant}"
            if self._redis.command("HEXISTS", key, field).startswith(b":1"):
                self._redis.command("HINCRBYFLOAT", key, field, str(-seconds))
