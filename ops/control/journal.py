"""Control's journal, an SQLite file: operations, model states, load times, worker-seconds, and
rollouts.

It is written before a step starts, so that a new process can continue after a crash at any point.
"""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from transport.control_protocol import ModelState
from triolet.errors import ConfigError
from triolet.private_files import make_private_database, take_private_folder
from triolet.sqlite import transaction

from .controller import Past
from .operations import ENDED, Operation, OperationStatus, WantedState
from .rollout_stores import SqliteRollouts
from .worker_seconds import SecondsAccount, Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from .models import Model

FILE_NAME: Final = "control.sqlite3"
SCHEMA_VERSION: Final = 4
"""Version 3 added operations on adapters, version 4 rollouts; earlier releases cannot read them."""
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS operations (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    model TEXT NOT NULL,
    wanted TEXT NOT NULL,
    actor TEXT NOT NULL,
    created_at REAL NOT NULL,
    status TEXT NOT NULL,
    progress TEXT NOT NULL,
    settings TEXT NOT NULL DEFAULT '',  -- JSON: an added model, an adapter or a switch
    run TEXT NOT NULL DEFAULT ''        -- id of the supervisor's run
) STRICT;
CREATE TABLE IF NOT EXISTS models (
    name TEXT PRIMARY KEY,
    digest TEXT NOT NULL,
    state TEXT NOT NULL,
    size_bytes INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS load_times (
    model TEXT NOT NULL,
    state TEXT NOT NULL,
    seconds REAL NOT NULL,
    PRIMARY KEY (model, state)
) STRICT;
CREATE TABLE IF NOT EXISTS worker_seconds (
    run TEXT NOT NULL,                  -- id of the supervisor's run; empty for earlier runs
    model TEXT NOT NULL,
    digest TEXT NOT NULL,
    seconds REAL NOT NULL,
    PRIMARY KEY (run, model, digest)
) STRICT;
CREATE TABLE IF NOT EXISTS rollouts (
    model TEXT PRIMARY KEY,             -- public name
    number INTEGER NOT NULL,            -- grows with each write
    renewed_at REAL NOT NULL,
    is_over INTEGER NOT NULL,
    body TEXT NOT NULL                  -- JSON
) STRICT;
"""
SINCE_1: Final = (
    "ALTER TABLE operations ADD COLUMN settings TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE operations ADD COLUMN run TEXT NOT NULL DEFAULT ''",
)
"""Migration from version 1."""
BUSY_S: Final = 10.0
"""Wait for the last transaction of a killed process that has not exited yet."""
KEPT_OPERATIONS: Final = 1000
"""Ended operations to keep: days of a fleet that loads a model every few minutes."""
_OPERATION: Final = "id, model, wanted, actor, created_at, status, progress, settings, run"


class Journal:
    """An open journal.

    Args:
      connection: connection to the database.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def past(self, digests: Mapping[str, str]) -> Past:
        """Return the state that an earlier process left.

        Args:
          digests: digest of the current version of each model; other versions are ignored.
        """
        rows = self._connection.execute("SELECT name, digest, state, size_bytes FROM models")
        known = {name: (digest, state, size) for name, digest, state, size in rows}
        known = {name: one for name, one in known.items() if digests.get(name) == one[0]}
        times = self._connection.execute("SELECT model, state, seconds FROM load_times")
        unfinished = self._connection.execute(
            f"SELECT {_OPERATION} FROM operations WHERE status IN (?, ?) ORDER BY number",
            (OperationStatus.WAITING.value, OperationStatus.RUNNING.value),
        )
        return Past(
            states={name: ModelState(state) for name, (_, state, _) in known.items()},
            sizes={name: size for name, (_, _, size) in known.items() if size},
            load_times={(name, ModelState(state)): s for name, state, s in times},
            unfinished=[_operation(row) for row in unfinished],
        )

    def operation(self, operation_id: str) -> Operation | None:
        """Return an operation, or None if it does not exist or ended long ago."""
        row = self._connection.execute(
            f"SELECT {_OPERATION} FROM operations WHERE id = ?", (operation_id,)
        ).fetchone()
        return None if row is None else _operation(row)

    def write(
        self,
        operations: Iterable[Operation],
        models: Iterable[Model],
        load_times: Mapping[tuple[str, ModelState], float],
    ) -> None:
        """Write changed operations, all models and load times in one transaction.

        Raises:
          sqlite3.Error: nothing was written.
        """
        with transaction(self._connection):
            self._connection.executemany(
                f"INSERT INTO operations ({_OPERATION}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON "
                "CONFLICT (id) DO UPDATE SET status = excluded.status, "
                "progress = excluded.progress",
                [msgspec.structs.astuple(operation) for operation in operations],
            )
            self._connection.executemany(
                "INSERT OR REPLACE INTO models VALUES (?, ?, ?, ?)",
                [
                    (m.config.name, m.config.digest, m.state, 0 if m.is_guess else m.size_bytes)
                    for m in models
                ],
            )
            self._connection.executemany(
                "INSERT OR REPLACE INTO load_times VALUES (?, ?, ?)",
                [(name, state, seconds) for (name, state), seconds in load_times.items()],
            )
            self._connection.execute(
                "DELETE FROM operations WHERE status IN (?, ?) AND number <= "
                "(SELECT max(number) FROM operations) - ?",
                (*sorted(ENDED), KEPT_OPERATIONS),
            )

    def forget(self, name: str) -> None:
        """Remove a dropped model, whose name may be used again.

        Raises:
          sqlite3.Error: it was not removed.
        """
        with transaction(self._connection):
            self._connection.execute("DELETE FROM models WHERE name = ?", (name,))
            self._connection.execute("DELETE FROM load_times WHERE model = ?", (name,))

    def rollouts(self) -> SqliteRollouts:
        """Return the store of rollouts in this journal."""
        return SqliteRollouts(self._connection)

    def account(self) -> SecondsAccount:
        """Return the worker-seconds that were last written."""
        # rowid: the order in which versions were first seen.
        rows = self._connection.execute(
            "SELECT run, model, digest, seconds FROM worker_seconds ORDER BY rowid"
        )
        return SecondsAccount({(run, Version(model, digest)): s for run, model, digest, s in rows})

    def write_account(self, account: SecondsAccount) -> None:
        """Write the worker-seconds.

        Raises:
          sqlite3.Error: nothing was written.
        """
        with transaction(self._connection):
            self._connection.execute("DELETE FROM worker_seconds")
            self._connection.executemany(
                "INSERT INTO worker_seconds VALUES (?, ?, ?, ?)",
                [(run, *version, seconds) for (run, version), seconds in account.known.items()],
            )


def _operation(row: tuple[str, str, str, str, float, str, str, str, str]) -> Operation:
    operation_id, model, wanted, actor, created_at, status, progress, settings, run = row
    return Operation(
        operation_id,
        model,
        WantedState(wanted),
        actor,
        created_at,
        OperationStatus(status),
        progress,
        settings,
        run,
    )


@contextmanager
def opened_journal(folder: Path) -> Iterator[Journal]:
    """Open the journal in a directory, which is created if needed.

    Raises:
      ConfigError: it cannot be used.
    """
    path = folder / FILE_NAME
    try:
        take_private_folder(folder, FILE_NAME)
        make_private_database(path)
        connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    except (OSError, sqlite3.Error) as error:
        raise _unusable(path, error) from error
    try:
        try:
            # Lock it while it is open: two fleets would continue each other's operations.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing
            with transaction(connection):
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                if not 0 <= version <= SCHEMA_VERSION:
                    raise ConfigError(
                        f"{path} has version {version}, but this release supports up to "
                        f"{SCHEMA_VERSION}; set another control.state_dir"
                    )
                for statement in (*SCHEMA.split(";\n"), *(SINCE_1 if version == 1 else ())):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        except sqlite3.Error as error:
            raise _unusable(path, error) from error
        yield Journal(connection)
    finally:
        connection.close()


def _unusable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"the journal {path} cannot be used: {error}; free disk space, stop the fleet that has it "
        "open, or set another control.state_dir"
    )
