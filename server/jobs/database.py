"""The SQLite database of files and batches: one connection, each change one transaction.

Knows SQL and transactions. Blocking: it is only ever called from one thread at a time
(storage.py). A second process may have the same database open; whoever runs batches holds a lease
in it, and every result is written in the transaction that checks that lease.
"""

from __future__ import annotations

import errno
import shutil
import sqlite3
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import structlog

from triolet.errors import ConfigError, RequestError, overloaded
from triolet.private_files import make_private_database, take_private_folder

from .schema import SCHEMA, SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = structlog.get_logger(__name__)

FILE_NAME: Final = "batches.sqlite3"
BUSY_S: Final = 10.0
"""How long a transaction waits for another process's: theirs take milliseconds."""
BUSY_POLL_S: Final = 0.01
LOG_AGAIN_S: Final = 60.0
"""After which an error that lasts is logged anew."""
LATER_S: Final = 5.0
"""When to ask again after the database failed."""
T = TypeVar("T")


def open_database(directory: str) -> sqlite3.Connection:
    """Open the database in a directory, which is made if it is not there.

    Raises:
      ConfigError: it cannot be used.
    """
    folder = Path(directory)
    try:
        take_private_folder(folder, FILE_NAME)
        make_private_database(folder / FILE_NAME)
        connection = sqlite3.connect(
            folder / FILE_NAME, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing
        connection.execute("PRAGMA secure_delete = OFF")
        with transaction(connection):
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, SCHEMA_VERSION):
                raise ConfigError(
                    f"the database in {folder} is of version {version}; this release knows "
                    f"{SCHEMA_VERSION}: give another --batch-dir"
                )
            for statement in SCHEMA.split(";"):
                if statement.strip():
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"--batch-dir is {directory!r} and cannot be used: {error}") from error
    connection.row_factory = sqlite3.Row
    return connection


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Let readers and the writer not wait for one another. Of several processes that open a new
    database at once one does this, and SQLite tells the others at once that it is busy, whatever
    their patience."""
    give_up = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
            time.sleep(BUSY_POLL_S)
        else:
            return


def free_bytes(connection: sqlite3.Connection, directory: str) -> int:
    """Return how much may still be written: on the disk, and into pages of deleted files."""
    (num_pages,) = connection.execute("PRAGMA freelist_count").fetchone()
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    return shutil.disk_usage(directory).free + int(num_pages * page_bytes)


class FailureLog:
    """Logs that the database fails: each error once, and again after a while, not at each try."""

    def __init__(self) -> None:
        self._error = ""
        self._again_at = 0.0

    def note(self, error: Exception) -> None:
        """Log an error that is news."""
        text, now = f"{type(error).__name__}: {error}", time.monotonic()
        if text != self._error or now >= self._again_at:
            log.error("database_failed", error=text)
            self._error, self._again_at = text, now + LOG_AGAIN_S


def stored(work: Callable[[], T], failures: FailureLog) -> T:
    """Do something with the database and return what it returns.

    Raises:
      RequestError: 507, the disk is full; 503, anything else, such as another process that holds
        the database for too long.
    """
    try:
        return work()
    except (sqlite3.Error, OSError) as error:
        if _is_full(error):
            # Logged once by what runs batches, which pauses them; here it would be each try.
            raise disk_full() from error
        failures.note(error)
        raise overloaded("files and batches cannot be stored just now", LATER_S) from error


def disk_full() -> RequestError:
    """Return the error for a disk without room for files and batches: 507."""
    return RequestError(
        "files and batches cannot be stored just now: the disk is full",
        status=507,
        code="disk_full",
        retry_after_s=LATER_S,
    )


def _is_full(error: Exception) -> bool:
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Change all or nothing, alone among all processes."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # some errors have ended it already
            connection.execute("ROLLBACK")
        raise
