"""Stored files, and `Storage`, which runs database calls on files and batches in a thread.

The calls of `Files` block. A result file has no content of its own: it consists of the results of
its batch's lines, so the file and the line states cannot disagree.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

import trio

from triolet.errors import RequestError
from triolet.sqlite import Journal, transaction

from ..api.errors import echo
from ..text.threads import in_thread
from .batches import Batches
from .database import FailureLog, free_bytes, open_database, stored
from .records import OPEN, FileRecord, Page

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

    from triolet.config import BatchConfig


COLUMNS: Final = "id, created_at, filename, purpose, bytes"
CONTENT_ROWS: Final = 64
"""Lines read per query."""


class Files:
    """All files.

    Args:
      connection: connection to the database.
      config: limits.
    """

    def __init__(self, connection: sqlite3.Connection, config: BatchConfig) -> None:
        self._connection = connection
        self._config = config

    def add(
        self, owner: str, file_id: str, filename: str, purpose: str, content: bytes, at: int
    ) -> FileRecord:
        """Add a file.

        Raises:
          RequestError: 413; too many files or bytes are stored already.
        """
        with transaction(self._connection):
            for one in ("", owner):
                self._check_room(one, len(content))
            self._connection.execute(
                "INSERT INTO files (id, owner, created_at, filename, purpose, bytes, content) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (file_id, owner, at, filename, purpose, len(content), content),
            )
        return FileRecord(file_id, at, filename, purpose, len(content))

    def _check_room(self, owner: str, num_bytes: int) -> None:
        """Raise RequestError (413) if an owner stores too much. Without an owner, count all
        files."""
        config = self._config
        count, held = self._connection.execute(
            "SELECT count(*), coalesce(sum(bytes), 0) FROM files WHERE ?1 = '' OR owner = ?1",
            (owner,),
        ).fetchone()
        if count >= config.most_of(owner, config.max_files) or (
            held + num_bytes > config.most_of(owner, config.max_total_bytes)
        ):
            of_owner = "of yours " if owner else ""
            raise RequestError(
                f"{count} files {of_owner}with {held} bytes are stored already; delete some",
                status=413,
                code="storage_full",
                param="file",
            )

    def get(self, owner: str, file_id: str) -> FileRecord | None:
        """Return a file, or None if it does not exist."""
        row = self._connection.execute(
            f"SELECT {COLUMNS} FROM files WHERE id = ? AND owner = ?", (file_id, owner)
        ).fetchone()
        return None if row is None else FileRecord(*row)

    def page(
        self, owner: str, after: str | None, limit: int, purpose: str | None
    ) -> Page[FileRecord]:
        """Return a page of files after `after`, newest first."""
        rows = self._connection.execute(
            f"SELECT {COLUMNS} FROM files WHERE (?1 IS NULL OR purpose = ?1) AND (?2 IS NULL OR "
            "rowid < (SELECT rowid FROM files WHERE id = ?2)) AND owner = ?4 "
            "ORDER BY rowid DESC LIMIT ?3",
            (purpose, after, limit + 1, owner),
        ).fetchall()
        return Page([FileRecord(*row) for row in rows[:limit]], len(rows) > limit)

    def delete(self, owner: str, file_id: str) -> bool:
        """Delete a file; return whether it existed.

        Raises:
          RequestError: 409; an open batch needs it.
        """
        with transaction(self._connection):
            marks = ", ".join("?" * len(OPEN))
            in_use = self._connection.execute(
                "SELECT id FROM batches WHERE input_file_id = ? AND owner = ? "
                f"AND status IN ({marks})",
                (file_id, owner, *OPEN),
            ).fetchone()
            if in_use is not None:
                raise RequestError(
                    f"batch {in_use[0]} runs the file {echo(file_id)}; cancel that batch first",
                    status=409,
                    code="file_in_use",
                )
            row = self._connection.execute(
                "DELETE FROM files WHERE id = ? AND owner = ? RETURNING batch_id, state",
                (file_id, owner),
            ).fetchone()
            if row is not None and row["batch_id"] is not None:
                self._connection.execute(
                    "UPDATE lines SET result = NULL WHERE batch_id = ? AND state = ?",
                    (row["batch_id"], row["state"]),
                )
        return row is not None

    def content(self, file_id: str, part: int) -> bytes | None:
        """Return a part of a file, counted from 0: empty after the last part, None if the file does
        not exist."""
        row = self._connection.execute(
            "SELECT batch_id, state, iif(?2, x'', content) AS content FROM files WHERE id = ?1",
            (file_id, part),
        ).fetchone()
        if row is None:
            return None
        if row["batch_id"] is None:
            return bytes(row["content"])
        rows = self._connection.execute(
            "SELECT result FROM lines WHERE batch_id = ? AND state = ? "
            "ORDER BY number LIMIT ? OFFSET ?",
            (row["batch_id"], row["state"], CONTENT_ROWS, part * CONTENT_ROWS),
        )
        return b"".join(one[0] for one in rows if one[0] is not None)


P = ParamSpec("P")
T = TypeVar("T")


def time_of_day() -> float:
    """Return seconds since 1970. Use this clock for times that are stored or shared between
    processes: creation times, batch deadlines, the lease."""
    return time.time()


class Storage:
    """The files and batches in one directory.

    Args:
      directory: the directory of the database.
      config: limits.
      holder: this process's name in the lease.
      journal: kind of journal; must be the same for all servers of the directory.

    Attributes:
      files: stored files; call through `run`.
      batches: stored batches; call through `run`.
      changed: set when there may be new work; replaced by the waiting task.
      paused: why no lines start (lack of space); None while lines start.

    Raises:
      ConfigError: the directory cannot be used.
    """

    def __init__(
        self,
        directory: str,
        config: BatchConfig,
        holder: str,
        journal: Journal = Journal.WRITE_AHEAD,
    ) -> None:
        self._directory = directory
        self._connection = open_database(directory, journal)
        self._failures = FailureLog()
        self._writer = trio.CapacityLimiter(1)
        self.files = Files(self._connection, config)
        self.batches = Batches(self._connection, config, holder)
        self.changed = trio.Event()
        self.paused: str | None = None

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of `files` or `batches` in a thread, one call at a time.

        Raises:
          RequestError: as the call does; 507 if the disk is full, 503 if the database fails.
        """
        work = partial(call, *args, **kwargs)
        return await in_thread(partial(stored, work, self._failures), self._writer)

    async def free_bytes(self) -> int:
        """Return how many bytes the database can still store: free disk space and its free pages.

        Raises:
          RequestError: 503, it cannot be determined.
        """
        return await self.run(free_bytes, self._connection, self._directory)

    def close(self) -> None:
        """Close the database. No call may be running."""
        self._connection.close()
