"""The SQLite schema of files and batches, and how database errors become HTTP errors."""

from __future__ import annotations

import errno
import shutil
import sqlite3
import time
from typing import TYPE_CHECKING, Final, TypeVar

import structlog

from triolet.errors import RequestError, overloaded, said_by
from triolet.sqlite import DatabaseForm, Journal, open_private_database

if TYPE_CHECKING:
    from collections.abc import Callable


SCHEMA_VERSION: Final = 1
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,              -- the tenant; empty without tenants
    created_at INTEGER NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    content BLOB,                     -- NULL: it consists of its batch's lines with this `state`
    batch_id TEXT,
    state INTEGER
) STRICT;
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    order_number INTEGER NOT NULL,
    status TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    window TEXT NOT NULL,
    metadata TEXT,
    errors TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    in_progress_at INTEGER,
    completed_at INTEGER,
    failed_at INTEGER,
    expired_at INTEGER,
    cancelling_at INTEGER,
    cancelled_at INTEGER,
    output_file_id TEXT,
    error_file_id TEXT,
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE IF NOT EXISTS lines (
    batch_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    body BLOB,                        -- the request; NULL once it has a result
    state INTEGER NOT NULL DEFAULT 0, -- 0 waiting, 1 answered, 2 failed
    result BLOB,
    PRIMARY KEY (batch_id, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS waiting_lines ON lines (batch_id, number) WHERE state = 0;
CREATE TABLE IF NOT EXISTS lease (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    holder TEXT NOT NULL,
    until REAL NOT NULL
) STRICT;
"""
WAITING: Final = 0
ANSWERED: Final = 1
FAILED: Final = 2


log = structlog.get_logger(__name__)

FILE_NAME: Final = "batches.sqlite3"
FORM: Final = DatabaseForm("the database", "--batch-dir", FILE_NAME, SCHEMA, SCHEMA_VERSION)
BUSY_S: Final = 10.0
"""How long a transaction waits for another process's transaction, which takes milliseconds."""
LOG_AGAIN_S: Final = 60.0
"""How long until a persistent error is logged again."""
LATER_S: Final = 5.0
"""`Retry-After` when the database fails."""
T = TypeVar("T")


def open_database(directory: str, journal: Journal = Journal.WRITE_AHEAD) -> sqlite3.Connection:
    """Open the database in a directory, creating the directory if necessary.

    Args:
      directory: the directory.
      journal: kind of journal; must be the same for all servers of the directory.

    Raises:
      ConfigError: it cannot be used.
    """
    connection = open_private_database(FORM, directory, BUSY_S, time.sleep, journal)
    connection.execute("PRAGMA secure_delete = OFF")
    connection.row_factory = sqlite3.Row
    return connection


def free_bytes(connection: sqlite3.Connection, directory: str) -> int:
    """Return how many bytes can still be written, counting free disk space and free pages."""
    (num_pages,) = connection.execute("PRAGMA freelist_count").fetchone()
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    return shutil.disk_usage(directory).free + int(num_pages * page_bytes)


class FailureLog:
    """Logs database failures: each error once, and again after a while, instead of on every try."""

    def __init__(self) -> None:
        self._error = ""
        self._again_at = 0.0

    def note(self, error: Exception) -> None:
        """Log an error if it is new or was last logged long ago."""
        text, now = said_by(error), time.monotonic()
        if text != self._error or now >= self._again_at:
            log.error("database_failed", error=text)
            self._error, self._again_at = text, now + LOG_AGAIN_S


def stored(work: Callable[[], T], failures: FailureLog) -> T:
    """Run a database operation and return its result.

    Raises:
      RequestError: 507 if the disk is full; 503 for any other failure, such as another process
        holding the database for too long.
    """
    try:
        return work()
    except (sqlite3.Error, OSError) as error:
        if _is_full(error):
            # The batch runner logs this once and pauses; here it would be logged on every try.
            raise RequestError(
                "files and batches cannot be stored just now: the disk is full",
                status=507,
                code="disk_full",
                retry_after_s=LATER_S,
            ) from error
        failures.note(error)
        raise overloaded("files and batches cannot be stored just now", LATER_S) from error


def _is_full(error: Exception) -> bool:
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
