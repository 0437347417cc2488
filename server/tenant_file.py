"""The operator's file of tenants, and the task that notices when it has changed.

Reads and waits; what the file means is decided elsewhere. A file counts as a whole or not at all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog
import trio

from triolet.errors import ConfigError
from triolet.tenants_form import read_tenants

from .threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from triolet.config_tenants import TenantsConfig
    from triolet.tenants import Tenants

    from .tenancy import Tenancy

log = structlog.get_logger(__name__)


class Stamp(NamedTuple):
    """By what a file is known to have changed. All 0 for one that is not there."""

    inode: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0  # who copies times along changes this one all the same
    size: int = 0


class TenantFile:
    """One file.

    Args:
      path: of it.
      config: bounds.
    """

    def __init__(self, path: str, config: TenantsConfig) -> None:
        self._path = Path(path)
        self._config = config
        self._seen = Stamp()
        self._taken = Stamp()

    def read(self) -> Tenants:
        """Return what it says now.

        Raises:
          ConfigError: it cannot be read, or something in it is wrong.
        """
        try:
            with self._path.open("rb") as file:
                # Of what is read, not of what may have come to this name meanwhile.
                self._taken = self._seen = _stamp(os.fstat(file.fileno()))
                content = file.read(self._config.max_bytes + 1)
        except OSError as error:
            raise ConfigError(f"the file of tenants cannot be read: {error}") from None
        if len(content) > self._config.max_bytes:
            raise ConfigError(
                f"{self._path} is longer than the {self._config.max_bytes} bytes of a file of "
                "tenants"
            )
        return read_tenants(content, str(self._path))

    def has_settled(self) -> bool:
        """Return whether it is another one than was read, and the same as at the last look."""
        try:
            stamp = _stamp(self._path.stat())
        except OSError:
            stamp = Stamp()
        is_as_seen, self._seen = stamp == self._seen, stamp
        return is_as_seen and stamp != self._taken

    async def run(self, tenancy: Tenancy, dismiss: Callable[[Set[str]], None]) -> None:
        """Let each change count.

        Args:
          tenancy: is told.
          dismiss: ends what runs for tenants that may ask no more.
        """
        threads = trio.CapacityLimiter(1)
        while True:
            await trio.sleep(self._config.poll_s)
            if not self.has_settled():
                continue
            self._taken = self._seen  # also of a file that cannot be opened: it is told once
            try:
                tenants = await in_thread(self.read, threads)
            except ConfigError as error:
                tenancy.refuse(str(error))
                log.error("tenants_refused", reason=str(error))
                continue
            gone = tenancy.replace(tenants)
            log.info("tenants_changed", tenants=len(tenants.by_name), gone=sorted(gone)[:100])
            dismiss(gone)


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
