"""Opens the store of tenant accounts that the configuration names, and builds `Quotas` on it."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from triolet.config import QuotaConfig, resolved_url
from triolet.tenants.plans import Prices

from .memory_store import MemoryStore, QuotaObserver, SpendFile, SpendWatch
from .quotas import Quotas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .redis_store import RedisStore


def quotas_in_memory() -> Quotas:
    """Return quotas with accounts in memory, lost when the process ends."""
    watch = SpendWatch(QuotaObserver())
    return Quotas(MemoryStore(QuotaConfig(), watch), watch, QuotaObserver(), lambda model: Prices())


@contextmanager
def opened_quotas(
    config: QuotaConfig, metrics: QuotaObserver, prices: Callable[[str], Prices]
) -> Iterator[Quotas]:
    """Open the configured store of accounts, and close it at the end.

    Raises:
      ConfigError: the store cannot be used.
    """
    watch = SpendWatch(metrics)
    config = replace(config, limits=resolved_url(config.limits, "--limits"))
    if config.is_shared:
        yield Quotas(_redis_store(config, watch), watch, metrics, prices)
        return
    file = (
        None if config.spend_file is None else SpendFile(config.spend_file, config.charged_once_s)
    )
    try:
        yield Quotas(MemoryStore(config, watch, file), watch, metrics, prices)
    finally:
        if file is not None:
            file.close()


def _redis_store(config: QuotaConfig, watch: SpendWatch) -> RedisStore:
    # Imported late: the library costs memory and a quarter of a second.
    from .redis_store import RedisStore

    return RedisStore(config, watch, secrets.token_hex(8))
