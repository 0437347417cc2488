"""What control writes down: operations, states as last known, measured loads, worker-seconds.

SQLite in one file, written before a step is begun: a process that is killed at any moment leaves a
journal from which the next one goes on.
"""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from triolet.control_protocol import ModelState
from triolet.errors import ConfigError
from triolet.private_files import make_private_database, take_private_folder
from triolet.sqlite import transaction

from .controller import Past
from .operations import ENDED, Operation, OperationStatus, WantedState
from .worker_seconds import SecondsAccount, Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from .models import Model

FILE_NAME: Final = "control.sqlite3"
SCHEMA_VERSION: Final = 3
"""Of version 3 are journals with operations on adapters, which earlier releases do not know."""
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
    settings TEXT NOT NULL DEFAULT '',  -- of a model that is added, or which adapter
    run TEXT NOT NULL DEFAULT ''        -- of the fleet whose models change
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
    run TEXT NOT NULL,                  -- of the supervisor; empty for all but the last
    model TEXT NOT NULL,
    digest TEXT NOT NULL,
    seconds REAL NOT NULL,
    PRIMARY KEY (run, model, digest)
) STRICT;
"""
SINCE_1: Final = (
    "ALTER TABLE operations ADD COLUMN settings TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE operations ADD COLUMN run TEXT NOT NULL DEFAULT ''",
)
"""What version 1 lacks."""
BUSY_S: Final = 10.0
"""For the last transaction of a process that was killed and is not gone yet."""
KEPT_OPERATIONS: Final = 1000
"""Operations that have ended: days of a fleet that loads a model every few minutes."""
_OPERATION: Final = "id, model, wanted, actor, created_at, status, progress, settings, run"


class Journal:
    """One open journal.

    Args:
      connection: to the database.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def past(self, digests: Mapping[str, str]) -> Past:
        """Return what an earlier process left.

        Args:
          digests: of the present version of each model; sizes of other versions do not count.
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
        """Return an operation, or None if there is none or it was long ago."""
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
        """Write down operations that have changed, and all models as they are.

        Raises:
          sqlite3.Error: nothing of it was written.
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
        """Remove what is known of a model that was dropped: another one may get its name.

        Raises:
          sqlite3.Error: it is still there.
        """
        with transaction(self._connection):
            self._connection.execute("DELETE FROM models WHERE name = ?", (name,))
            self._connection.execute("DELETE FROM load_times WHERE model = ?", (name,))

    def account(self) -> SecondsAccount:
        """Return the worker-seconds as they were written down last."""
        # In the order in which they were first seen.
        rows = self._connection.execute(
            "SELECT run, model, digest, seconds FROM worker_seconds ORDER BY rowid"
        )
        return SecondsAccount({(run, Version(model, digest)): s for run, model, digest, s in rows})

    def write_account(self, account: SecondsAccount) -> None:
        """Write down the worker-seconds.

        Raises:
          sqlite3.Error: nothing of it was written.
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
    """Open the journal in a folder, which is made if it is not there.

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
            # For as long as it is open: two fleets would take up one another's operations.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing
            with transaction(connection):
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                if not 0 <= version <= SCHEMA_VERSION:
                    raise ConfigError(
                        f"{path} is of version {version}; this release knows {SCHEMA_VERSION}: "
                        "give another control.state_dir"
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
        f"the journal {path} cannot be used: {error}; make room there, end the fleet that has it "
        "open, or give another control.state_dir"
    )
