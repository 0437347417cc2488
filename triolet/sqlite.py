"""Open SQLite databases in private folders, and run transactions."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from .errors import ConfigError
from .private_files import make_private_database, take_private_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUSY_POLL_S: Final = 0.01
JOURNAL_TRIES: Final = 1000
"""Ten seconds in all: other processes take milliseconds."""


class Journal(StrEnum):
    """How SQLite makes transactions atomic."""

    WRITE_AHEAD = "WAL"  # readers and the writer do not block each other; works on one machine only
    ROLLBACK = "DELETE"  # needs only POSIX locks, so several machines may share the folder


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run a transaction: all changes or none, exclusive among all processes."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # some errors end it
            connection.execute("ROLLBACK")
        raise


def _set_journal(
    connection: sqlite3.Connection, journal: Journal, sleep: Callable[[float], None]
) -> None:
    """Set the kind of journal, and retry: if several processes open a new database at once, all but
    one get `busy` immediately, whatever their timeout."""
    for left in reversed(range(JOURNAL_TRIES)):
        try:
            connection.execute(f"PRAGMA journal_mode = {journal}")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or not left:
                raise
            sleep(BUSY_POLL_S)
        else:
            return


class DatabaseForm(NamedTuple):
    """Properties of a database.

    Attributes:
      what: its name in errors, such as `the usage ledger`.
      option: the option that names its folder.
      file_name: name of the file in the folder.
      schema: statements that may be executed repeatedly.
      version: version of the schema, from 1.
    """

    what: str
    option: str
    file_name: str
    schema: str
    version: int


def open_private_database(
    form: DatabaseForm,
    directory: str,
    busy_s: float,
    sleep: Callable[[float], None],
    journal: Journal = Journal.WRITE_AHEAD,
) -> sqlite3.Connection:
    """Open a database for writing from any thread. Create it and its folder if missing.

    Args:
      form: schema of the database.
      directory: its folder.
      busy_s: how long a transaction waits for one of another process.
      sleep: waits for some seconds while another process creates the database.
      journal: kind of journal; must be the same for all processes.

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
        _set_journal(connection, journal, sleep)
        # A killed process loses nothing at any level. FULL protects a rollback journal from power
        # cuts.
        level = "NORMAL" if journal is Journal.WRITE_AHEAD else "FULL"
        connection.execute(f"PRAGMA synchronous = {level}")
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
      ConfigError: it was made by another release.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, form.version):
        raise ConfigError(
            f"{form.what} in {folder} has version {version}; this release needs {form.version}: "
            f"give another {form.option}"
        )
