"""Transactions and the write-ahead log of SQLite."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUSY_POLL_S: Final = 0.01
WRITE_AHEAD_TRIES: Final = 1000
"""Ten seconds: other processes take milliseconds."""


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


def write_ahead(connection: sqlite3.Connection, sleep: Callable[[float], None]) -> None:
    """Set the write-ahead log, so that readers and the writer do not wait for one another. Where
    several processes open a new database at once, SQLite reports `busy` to all but one at once,
    whatever their timeout: so this is tried again."""
    for left in reversed(range(WRITE_AHEAD_TRIES)):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or not left:
                raise
            sleep(BUSY_POLL_S)
        else:
            return
