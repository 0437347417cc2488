"""The database of the usage ledger: one row for each ended request. Servers write it
(server/tenants/usage_ledger.py), `triolet usage` reads it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .errors import ConfigError
from .sqlite import DatabaseForm, open_private_database, require_version, transaction

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
FORM: Final = DatabaseForm("the usage ledger", "--usage-dir", FILE_NAME, SCHEMA, SCHEMA_VERSION)
FIELDS: Final = {
    "tenant": "tenant",
    "model": "model",
    "version": "version",
    "class": "class",
    "day": "date(ended_at, 'unixepoch')",
    "outcome": "outcome",
}
"""Fields by which usage can be summed; days are in UTC."""


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
    """Open the database in a folder for writing; create both if they are missing.

    Args:
      directory: the folder.
      busy_s: how long a transaction waits for another process's.
      sleep: waits for some seconds while another process creates the database.

    Raises:
      ConfigError: it cannot be used.
    """
    return open_private_database(FORM, directory, busy_s, sleep)


def write_records(
    connection: sqlite3.Connection, records: Sequence[UsageRecord], delete_before: float
) -> None:
    """Write records in one transaction, and delete as many that ended before a given time. So the
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
    """Sum the records since a time: for each value of the fields (keys of FIELDS) the number of
    requests, the prompt, cached, completion and reasoning tokens, and the price in nanos.

    Raises:
      ConfigError: there is no ledger, or it cannot be read.
    """
    path = Path(directory) / FILE_NAME
    if not path.is_file():
        raise ConfigError(
            f"{directory} has no usage ledger: give the --usage-dir with which servers were started"
        )
    keys = ", ".join(FIELDS[field] for field in fields)
    sums = "count(*), " + ", ".join(
        f"coalesce(sum({column}), 0)" for column in UsageRecord._fields[-5:]
    )
    order = ", ".join(str(position) for position in range(1, len(fields) + 1))
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as found:
            require_version(found, FORM, path.parent)
            query = f"SELECT {keys}, {sums} FROM requests WHERE ended_at >= ?"
            return found.execute(f"{query} GROUP BY {order} ORDER BY {order}", (since,)).fetchall()
    except sqlite3.Error as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
