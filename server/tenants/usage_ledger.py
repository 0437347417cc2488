"""The usage ledger: writes one record per ended request to SQLite, in its own thread.

Requests never wait for it: records wait in a bounded queue. While the database cannot be written,
the oldest records are kept, and those without room are dropped and counted.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import contextmanager
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING

import structlog

from triolet.config import DAY_S
from triolet.errors import said_by
from triolet.usage_database import UsageRecord, open_usage_database, write_records

from ..contract.request_events import RequestEnded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from triolet.config import UsageConfig

    from ..contract.request_events import RequestEvents

log = structlog.get_logger(__name__)


class UsageLedger:
    """The usage records of one server.

    Args:
      connection: connection to the database, used only by the ledger's thread.
      config: bounds.
      clock: returns the Unix time.

    Attributes:
      dropped: records that were lost.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        config: UsageConfig,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.dropped = 0
        self._connection = connection
        self._config = config
        self._clock = clock
        self._waiting: Queue[UsageRecord] = Queue(config.max_queued)
        self._batch: list[UsageRecord] = []
        self._trouble = ""
        self._reported = 0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage_ledger", daemon=True)
        self._thread.start()

    def subscribe_to(self, events: RequestEvents) -> None:
        """Record requests that end from now on."""
        events.subscribe(RequestEnded, self._add)

    def close(self) -> None:
        """Write the waiting records and close the database. Records not written in time are
        dropped."""
        self._is_closing.set()
        self._thread.join(self._config.close_s)
        left = len(self._batch) + self._waiting.qsize()
        if left:
            self.dropped += left
            log.error("usage_records_dropped", records=left, trouble=self._trouble)
        if not self._thread.is_alive():
            self._connection.close()

    def _add(self, event: RequestEnded) -> None:
        facts, usage, cost = event.facts, event.counted, event.cost
        record = UsageRecord(
            self._clock(),
            facts.request_id.hex(),
            facts.tenant,
            facts.model,
            facts.model_digest,
            facts.service_class.name.lower(),
            event.outcome,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            usage.reasoning_tokens,
            None if cost is None else cost.nanos,
        )
        try:
            self._waiting.put_nowait(record)
        except Full:
            self.dropped += 1

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closing.wait(self._config.interval_s)
            self._report(self._write_waiting())

    def _write_waiting(self) -> str:
        """Write all waiting records; return the trouble, empty if there is none."""
        try:
            while self._fill_batch():
                before = self._clock() - self._config.retention_days * DAY_S
                write_records(self._connection, self._batch, before)
                self._batch = []
        except (sqlite3.Error, OverflowError) as error:  # OverflowError: too large for an INTEGER
            return said_by(error)
        return "the queue was full" if self.dropped > self._reported else ""

    def _fill_batch(self) -> bool:
        """Take the next records, after those that could not be written yet; return whether there
        are any."""
        while len(self._batch) < self._config.batch_records:
            try:
                self._batch.append(self._waiting.get_nowait())
            except Empty:
                break
        return bool(self._batch)

    def _report(self, trouble: str) -> None:
        """Log when trouble starts and ends, not at each attempt."""
        if trouble and not self._trouble:
            log.error("usage_ledger_failed", trouble=trouble, dropped=self.dropped)
        elif self._trouble and not trouble:
            log.warning("usage_ledger_works_again", dropped=self.dropped)
        self._trouble, self._reported = trouble, self.dropped


@contextmanager
def opened_ledger(config: UsageConfig) -> Iterator[UsageLedger | None]:
    """Open the configured ledger and close it at the end; yield None if there is none.

    Raises:
      ConfigError: the ledger cannot be opened.
    """
    if config.directory is None:
        yield None
        return
    connection = open_usage_database(config.directory, config.busy_s, time.sleep)
    ledger = UsageLedger(connection, config)
    try:
        yield ledger
    finally:
        ledger.close()
