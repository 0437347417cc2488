"""Opens the accounts of tenants where they are kept, and builds `Quotas` over them."""

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
    """Return limits with accounts in this process, which end with it."""
    watch = SpendWatch(QuotaObserver())
    return Quotas(MemoryStore(QuotaConfig(), watch), watch, QuotaObserver(), lambda model: Prices())


@contextmanager
def opened_quotas(
    config: QuotaConfig, metrics: QuotaObserver, prices: Callable[[str], Prices]
) -> Iterator[Quotas]:
    """Open the accounts where they are kept, and close them in the end.

    Raises:
      ConfigError: they cannot be kept there.
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
    """Return the same with the URL in the place of the file that holds it."""
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
    # The library takes memory and a quarter of a second, of which only its users shall know.
    from .redis_store import RedisStore

    return RedisStore(config, watch, secrets.token_hex(8))
