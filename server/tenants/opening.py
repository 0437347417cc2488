"""Opens the store of tenant accounts that the configuration names, and builds `Quotas` on it."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from triolet.config import AT, QuotaConfig
from triolet.errors import ConfigError
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
    watch, config = SpendWatch(metrics), _resolved(config)
    if config.is_shared:
        yield Quotas(_redis_store(config, watch), watch, metrics, prices)
        return
    file = None if config.spend_file is None else SpendFile(config.spend_file)
    try:
        yield Quotas(MemoryStore(config, watch, file), watch, metrics, prices)
    finally:
        if file is not None:
            file.close()


def _resolved(config: QuotaConfig) -> QuotaConfig:
    """Return the config with an `@FILE` replaced by the URL that the file holds."""
    if not config.limits.startswith(AT):
        return config
    try:
        url = Path(config.limits.removeprefix(AT)).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file that --limits names cannot be read: {error}") from None
    if url.startswith(AT):
        raise ConfigError("the file that --limits names must hold a URL, not another file's name")
    return replace(config, limits=url)


def _redis_store(config: QuotaConfig, watch: SpendWatch) -> RedisStore:
    # Imported late: the library costs memory and a quarter of a second.
    from .redis_store import RedisStore

    return RedisStore(config, watch, secrets.token_hex(8))
