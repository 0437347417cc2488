"""Databases of SQLite in private folders, and their transactions."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from .errors import ConfigError
from .private_files import make_private_database, take_private_folder

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


def _write_ahead(connection: sqlite3.Connection, sleep: Callable[[float], None]) -> None:
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


class DatabaseForm(NamedTuple):
    """What a database is.

    Attributes:
      what: for errors: `the usage ledger`.
      option: that names its folder.
      file_name: in the folder.
      schema: statements, which do nothing where they were executed before.
      version: of the schema, from 1.
    """

    what: str
    option: str
    file_name: str
    schema: str
    version: int


def open_private_database(
    form: DatabaseForm, directory: str, busy_s: float, sleep: Callable[[float], None]
) -> sqlite3.Connection:
    """Open a database for writing, from any thread. Create it and its folder if they are missing.

    Args:
      form: of the database.
      directory: its folder.
      busy_s: how long a transaction waits for another process's.
      sleep: waits so many seconds while another process creates the database.

    Raises:
      ConfigError: it cannot be used.
    """
    folder = Path(directory)
    path = folder / form.file_name
    try:
        take_private_folder(folder, form.file_name)
        make_private_database(path)
        connection = sqlite3.connect(
            path, timeout=busy_s, isolation_level=None, check_same_thread=False
        )
        _write_ahead(connection, sleep)
        connection.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing
        with transaction(connection):
            require_version(connection, form, folder)
            for statement in filter(str.strip, form.schema.split(";\n")):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {form.version}")
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"{form.option} is {directory!r} and cannot be used: {error}") from error
    return connection


def require_version(connection: sqlite3.Connection, form: DatabaseForm, folder: Path) -> None:
    """Check that a database is new or has this schema.

    Raises:
      ConfigError: another release made it.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, form.version):
        raise ConfigError(
            f"{form.what} in {folder} is of version {version}; this release knows {form.version}: "
            f"give another {form.option}"
        )
