"""Stored files: what was uploaded, and the results of batches seen as files.

Blocking. A result's file has no content of its own: it is the answered lines of its
batch, so that a line cannot be done and missing in the file, or the other way round.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

import trio

from triolet.errors import RequestError
from triolet.sqlite import transaction

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
"""Lines that are read at once."""


class Files:
    """All files.

    Args:
      connection: of the database.
      config: how much may be kept.
    """

    def __init__(self, connection: sqlite3.Connection, config: BatchConfig) -> None:
        self._connection = connection
        self._config = config

    def add(
        self, owner: str, file_id: str, filename: str, purpose: str, content: bytes, at: int
    ) -> FileRecord:
        """Add a file.

        Raises:
          RequestError: 413; too many are kept already.
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
        """Raise the RequestError, 413, if an owner has too much; all do, where none is named."""
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
                f"{count} files {of_owner}with {held} bytes are kept already; delete some",
                status=413,
                code="storage_full",
                param="file",
            )

    def get(self, owner: str, file_id: str) -> FileRecord | None:
        """Return a file, or None."""
        row = self._connection.execute(
            f"SELECT {COLUMNS} FROM files WHERE id = ? AND owner = ?", (file_id, owner)
        ).fetchone()
        return None if row is None else FileRecord(*row)

    def page(
        self, owner: str, after: str | None, limit: int, purpose: str | None
    ) -> Page[FileRecord]:
        """Return some files, newest first, behind `after`."""
        rows = self._connection.execute(
            f"SELECT {COLUMNS} FROM files WHERE (?1 IS NULL OR purpose = ?1) AND (?2 IS NULL OR "
            "rowid < (SELECT rowid FROM files WHERE id = ?2)) AND owner = ?4 "
            "ORDER BY rowid DESC LIMIT ?3",
            (purpose, after, limit + 1, owner),
        ).fetchall()
        return Page([FileRecord(*row) for row in rows[:limit]], len(rows) > limit)

    def delete(self, owner: str, file_id: str) -> bool:
        """Delete a file; return whether it was there.

        Raises:
          RequestError: 409; a batch that has not ended needs it.
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
        """Return a part of a file, counted from 0; nothing behind the last one, None if there is
        no such file."""
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
    """Return seconds since 1970: the clock of what outlives a process or is shared by several, such
    as creation times, ends of batches and the lease."""
    return time.time()


class Storage:
    """Files and batches of one directory.

    Args:
      directory: where the database is.
      config: bounds.
      holder: this process, as the lease names it.

    Attributes:
      files: to be called through `run`.
      batches: likewise.
      changed: set whenever there may be new work; replaced by the waiting task.
      paused: why no line of a batch begins, for want of room; None while lines begin.

    Raises:
      ConfigError: the directory cannot be used.
    """

    def __init__(self, directory: str, config: BatchConfig, holder: str) -> None:
        self._directory = directory
        self._connection = open_database(directory)
        self._failures = FailureLog()
        self._writer = trio.CapacityLimiter(1)
        self.files = Files(self._connection, config)
        self.batches = Batches(self._connection, config, holder)
        self.changed = trio.Event()
        self.paused: str | None = None

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of `files` or `batches` in a thread, one call at a time.

        Raises:
          RequestError: as the call does; 507 where the disk is full, 503 where the database fails.
        """
        work = partial(call, *args, **kwargs)
        return await in_thread(partial(stored, work, self._failures), self._writer)

    async def free_bytes(self) -> int:
        """Return how much the database may still take: of its disk, and of its own free pages.

        Raises:
          RequestError: 503, it cannot be known.
        """
        return await self.run(free_bytes, self._connection, self._directory)

    def close(self) -> None:
        """Close the database. No call may be under way."""
        self._connection.close()
