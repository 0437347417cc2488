"""The file in which spend outlives a process whose accounts are in memory.

Knows SQL. Blocking: called from one thread at a time. Several servers of one host may share it:
each adds what was spent with it, and is told what was spent with all.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from triolet.errors import ConfigError
from triolet.private_files import make_private_database, make_private_folder
from triolet.units import SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping

BUSY_S: Final = 5 * SECONDS
"""Others' transactions take milliseconds."""
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS spend (
  month TEXT NOT NULL, tenant TEXT NOT NULL, nanos INTEGER NOT NULL, tokens INTEGER NOT NULL,
  PRIMARY KEY (month, tenant)
) STRICT, WITHOUT ROWID
"""
ADD: Final = """
INSERT INTO spend VALUES (?, ?, ?, ?)
ON CONFLICT DO UPDATE SET nanos = nanos + excluded.nanos, tokens = tokens + excluded.tokens
"""


class Spend(NamedTuple):
    """Of one tenant in one month."""

    nanos: int
    tokens: int


Key: TypeAlias = tuple[str, str]
"""Month and tenant."""


class SpendFile:
    """One file.

    Args:
      path: made if it is not there.

    Raises:
      ConfigError: it cannot be used.
    """

    def __init__(self, path: str) -> None:
        try:
            # The folder is the operator's, of any mode: it often holds the tenants' file and more.
            make_private_folder(Path(path).parent)
            make_private_database(Path(path))
            self._connection = sqlite3.connect(
                path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"{path} cannot keep what tenants have spent: {error}; give another --spend-file"
            ) from error

    def add(self, spend: Mapping[Key, Spend], month: str) -> dict[Key, Spend]:
        """Write down what was spent, all or nothing.

        Returns:
          What everybody has spent in the month, and in those that were added to.

        Raises:
          sqlite3.Error: nothing was written.
        """
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.executemany(ADD, [(*key, *more) for key, more in spend.items()])
            months = {month, *(of for of, _ in spend)}
            rows = [
                row
                for of in months
                for row in connection.execute("SELECT * FROM spend WHERE month = ?", (of,))
            ]
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return {(of, tenant): Spend(nanos, tokens) for of, tenant, nanos, tokens in rows}

    def close(self) -> None:
        """Close it. Nobody may be calling."""
        self._connection.close()
