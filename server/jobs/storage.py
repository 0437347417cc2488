"""The database seen from Trio: every call runs in one thread at a time, none on the event loop.

Knows Trio's threads; knows no SQL.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import trio

from ..threads import in_thread
from .batches import Batches
from .database import FailureLog, free_bytes, open_database, stored
from .files import Files

if TYPE_CHECKING:
    from collections.abc import Callable

    from triolet.config_batches import BatchConfig

P = ParamSpec("P")
T = TypeVar("T")


def time_of_day() -> float:
    """Return seconds since 1970. What outlives a process, and what several share, knows no other
    clock: when something was made, when a batch expires, until when a lease holds."""
    return time.time()


class Storage:
    """Files and batches of one directory.

    Args:
      directory: where the database is.
      config: bounds.
      holder: this process, as the lease names it.

    Attributes:
      files: to be called through `run`.
      batches: likewise.
      changed: set whenever there may be new work; replaced by whoever waits for it.
      paused: why no line of a batch begins, for want of room; None while lines begin.

    Raises:
      ConfigError: the directory cannot be used.
    """

    def __init__(self, directory: str, config: BatchConfig, holder: str) -> None:
        self._directory = directory
        self._connection = open_database(directory)
        self._failures = FailureLog()
        self._writer = trio.CapacityLimiter(1)
        self.files = Files(self._connection, config)
        self.batches = Batches(self._connection, config, holder)
        self.changed = trio.Event()
        self.paused: str | None = None

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something of `files` or `batches`, to its end, in the writer's turn.

        Raises:
          RequestError: as the call does; 507 where the disk is full, 503 where the database fails.
        """
        work = partial(call, *args, **kwargs)
        return await in_thread(partial(stored, work, self._failures), self._writer)

    async def free_bytes(self) -> int:
        """Return how much the database may still take: of its disk, and of its own free pages.

        Raises:
          RequestError: 503, it cannot be known.
        """
        return await self.run(free_bytes, self._connection, self._directory)

    def close(self) -> None:
        """Close the database. Nobody may be calling."""
        self._connection.close()
