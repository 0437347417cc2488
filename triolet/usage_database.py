"""The database of the usage ledger: one row for each request that ended. Servers write it
(server/tenants/usage_ledger.py), `triolet usage` reads it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .errors import ConfigError
from .private_files import make_private_database, take_private_folder
from .sqlite import transaction, write_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FILE_NAME: Final = "usage.sqlite3"
SCHEMA_VERSION: Final = 1
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS requests (
    ended_at REAL NOT NULL,           -- seconds since 1970
    request_id TEXT NOT NULL,
    tenant TEXT NOT NULL,             -- empty where there are none
    model TEXT NOT NULL,
    version TEXT NOT NULL,            -- digest, empty for a model in no store
    class TEXT NOT NULL,
    outcome TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,   -- holds cached_tokens
    cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    reasoning_tokens INTEGER,         -- of the completion; NULL: the model does not reason
    price_nanos INTEGER               -- NULL: nothing is charged
) STRICT;
CREATE INDEX IF NOT EXISTS requests_by_time ON requests (ended_at);
"""
FIELDS: Final = {
    "tenant": "tenant",
    "model": "model",
    "version": "version",
    "class": "class",
    "day": "date(ended_at, 'unixepoch')",
    "outcome": "outcome",
}
"""What usage can be summed by; days are of UTC."""
NANOS: Final = 1_000_000_000


class UsageRecord(NamedTuple):
    """One row, in the order of the columns."""

    ended_at: float
    request_id: str
    tenant: str
    model: str
    version: str
    service_class: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None
    price_nanos: int | None


def open_usage_database(
    directory: str, busy_s: float, sleep: Callable[[float], None]
) -> sqlite3.Connection:
    """Open the database in a folder for writing; both are made if they are not there.

    Args:
      directory: the folder.
      busy_s: how long a transaction waits for another process's.
      sleep: waits so many seconds while another process makes the database.

    Raises:
      ConfigError: it cannot be used.
    """
    folder = Path(directory)
    try:
        take_private_folder(folder, FILE_NAME)
        make_private_database(folder / FILE_NAME)
        connection = sqlite3.connect(
            folder / FILE_NAME, timeout=busy_s, isolation_level=None, check_same_thread=False
        )
        write_ahead(connection, sleep)
        connection.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing
        with transaction(connection):
            _require_version(connection, folder)
            for statement in filter(str.strip, SCHEMA.split(";\n")):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"--usage-dir is {directory!r} and cannot be used: {error}") from error
    return connection


def write_records(
    connection: sqlite3.Connection, records: Sequence[UsageRecord], delete_before: float
) -> None:
    """Write records in one transaction, and delete as many that ended before a time: so the
    database stops growing without a pause for a large deletion.

    Raises:
      sqlite3.Error: nothing was changed.
    """
    marks = ", ".join("?" * len(UsageRecord._fields))
    with transaction(connection):
        connection.execute(
            "DELETE FROM requests WHERE rowid IN "
            "(SELECT rowid FROM requests WHERE ended_at < ? LIMIT ?)",
            (delete_before, len(records)),
        )
        connection.executemany(f"INSERT INTO requests VALUES ({marks})", records)


def usage_by(directory: str, fields: Sequence[str], since: float) -> list[tuple[Any, ...]]:
    """Return sums of the records since a time: for each value of the fields (keys of FIELDS)
    requests, prompt, cached, completion and reasoning tokens, and the price in nanos.

    Raises:
      ConfigError: there is no ledger, or it cannot be read.
    """
    path = Path(directory) / FILE_NAME
    if not path.is_file():
        raise ConfigError(
            f"{directory} has no usage ledger: give the --usage-dir that servers were started with"
        )
    keys = ", ".join(FIELDS[field] for field in fields)
    sums = "count(*), " + ", ".join(
        f"coalesce(sum({column}), 0)" for column in UsageRecord._fields[-5:]
    )
    order = ", ".join(str(position) for position in range(1, len(fields) + 1))
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as found:
            _require_version(found, path.parent)
            query = f"SELECT {keys}, {sums} FROM requests WHERE ended_at >= ?"
            return found.execute(f"{query} GROUP BY {order} ORDER BY {order}", (since,)).fetchall()
    except sqlite3.Error as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _require_version(connection: sqlite3.Connection, folder: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, SCHEMA_VERSION):
        raise ConfigError(
            f"the usage ledger in {folder} is of version {version}; this release knows "
            f"{SCHEMA_VERSION}: give another --usage-dir"
        )
