"""The usage ledger: a record for each request that ends, written to SQLite by a thread of its own.

Requests never wait for it: records wait in a queue with a bound. While the database cannot be
written the oldest ones are kept, and those for which there is no room are dropped and counted.
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
    """The records of one server.

    Args:
      connection: of the database; used by the ledger's thread alone.
      config: bounds.
      clock: returns seconds since 1970.

    Attributes:
      dropped: records that are in no database and never will be.
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
        """Record what ends from now on."""
        events.subscribe(RequestEnded, self._add)

    def close(self) -> None:
        """Write what waits, and close the database; what cannot be written in time is dropped."""
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
        """Write all that waits; return what is in the way, empty if nothing is."""
        try:
            while self._fill_batch():
                before = self._clock() - self._config.retention_days * DAY_S
                write_records(self._connection, self._batch, before)
                self._batch = []
        except (sqlite3.Error, OverflowError) as error:  # the latter: no INTEGER is so large
            return said_by(error)
        return "the queue was full" if self.dropped > self._reported else ""

    def _fill_batch(self) -> bool:
        """Take the next records, unless some are kept that could not be written; return whether
        there are any."""
        while len(self._batch) < self._config.batch_records:
            try:
                self._batch.append(self._waiting.get_nowait())
            except Empty:
                break
        return bool(self._batch)

    def _report(self, trouble: str) -> None:
        """Log when trouble begins and when it is over, not at each try."""
        if trouble and not self._trouble:
            log.error("usage_ledger_failed", trouble=trouble, dropped=self.dropped)
        elif self._trouble and not trouble:
            log.warning("usage_ledger_works_again", dropped=self.dropped)
        self._trouble, self._reported = trouble, self.dropped


@contextmanager
def opened_ledger(config: UsageConfig) -> Iterator[UsageLedger | None]:
    """Open the ledger where it is kept, and close it in the end; None where it is not kept.

    Raises:
      ConfigError: it cannot be kept there.
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
