"""Batches in SQLite: their states, their lines, and the lease that lets one process run them.

All calls block. One transaction writes a line's result, the batch's counts and, with the last line,
the end of the batch; only the holder of the lease may write it. So a line may be computed twice if
a process dies or stalls, but it gets one result only.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from triolet.errors import RequestError
from triolet.sqlite import transaction

from ..api.errors import echo
from . import database
from .records import (
    OPEN,
    BatchRecord,
    BatchState,
    BatchStep,
    Counts,
    Page,
    WaitingLine,
    after,
    check_file,
    error_line,
)

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection

    from triolet.config import BatchConfig

    from .records import CheckedFile

OUTPUT, ERRORS = "output", "error"
_TIME_OF: Final = {
    BatchState.IN_PROGRESS: "in_progress_at",
    BatchState.COMPLETED: "completed_at",
    BatchState.FAILED: "failed_at",
    BatchState.EXPIRED: "expired_at",
    BatchState.CANCELLING: "cancelling_at",
    BatchState.CANCELLED: "cancelled_at",
}
_UNDONE: Final = {
    BatchStep.EXPIRE: ("batch_expired", "the batch's window ended before this line was run"),
    BatchStep.STOP: ("batch_cancelled", "the batch was cancelled before this line was run"),
}


class Batches:
    """All batches.

    Args:
      connection: connection to the database.
      config: limits.
      holder: this process's name in the lease.
    """

    def __init__(self, connection: sqlite3.Connection, config: BatchConfig, holder: str) -> None:
        self._connection = connection
        self._config = config
        self._holder = holder

    def add(self, owner: str, batch: BatchRecord) -> BatchRecord:
        """Add a batch.

        Raises:
          RequestError: its file does not exist, or too many batches are open.
        """
        with transaction(self._connection):
            row = self._connection.execute(
                "SELECT purpose FROM files WHERE id = ? AND owner = ?", (batch.input_file_id, owner)
            ).fetchone()
            if row is None:
                raise RequestError(
                    f"there is no file {echo(batch.input_file_id)}",
                    status=404,
                    code="not_found",
                    param="input_file_id",
                )
            if row["purpose"] != "batch":
                raise RequestError(
                    f"the file {echo(batch.input_file_id)} was not uploaded with purpose batch",
                    status=400,
                    code="invalid_request_error",
                    param="input_file_id",
                )
            marks = ", ".join("?" * len(OPEN))
            num_open, num_own = self._connection.execute(
                "SELECT count(*), coalesce(sum(owner = ?), 0) FROM batches "
                f"WHERE status IN ({marks})",
                (owner, *OPEN),
            ).fetchone()
            most = self._config.max_open_batches
            if num_open >= most or num_own >= self._config.most_of(owner, most):
                raise RequestError(
                    f"{num_open} batches have not ended, {num_own} of them yours; try again later",
                    status=429,
                    code="rate_limit_exceeded",
                    retry_after_s=60.0,
                )
            self._connection.execute(
                "INSERT INTO batches (id, owner, order_number, status, endpoint, input_file_id, "
                "window, metadata, created_at, expires_at) VALUES (?, ?, (SELECT "
                "coalesce(max(order_number), 0) + 1 FROM batches), ?, ?, ?, ?, ?, ?, ?)",
                (
                    batch.id,
                    owner,
                    batch.status,
                    batch.endpoint,
                    batch.input_file_id,
                    batch.completion_window,
                    None if batch.metadata is None else json.dumps(batch.metadata),
                    batch.created_at,
                    batch.expires_at,
                ),
            )
        return batch

    def get(self, batch_id: str, owner: str | None = None) -> BatchRecord | None:
        """Return a batch, or None. If an owner is given, return only that owner's batch."""
        row = self._connection.execute(
            "SELECT * FROM batches WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)", (batch_id, owner)
        ).fetchone()
        return None if row is None else _record(row)

    def page(self, owner: str, after_id: str | None, limit: int) -> Page[BatchRecord]:
        """Return a page of batches after `after_id`, newest first."""
        rows = self._connection.execute(
            "SELECT * FROM batches WHERE (?1 IS NULL OR order_number < (SELECT order_number FROM "
            "batches WHERE id = ?1)) AND owner = ?3 ORDER BY order_number DESC LIMIT ?2",
            (after_id, limit + 1, owner),
        ).fetchall()
        return Page([_record(row) for row in rows[:limit]], len(rows) > limit)

    def cancel(self, owner: str, batch_id: str, now: int) -> BatchRecord | None:
        """Cancel a batch; return it, or None if it does not exist.

        Raises:
          RequestError: 409; it has ended.
        """
        with transaction(self._connection):
            batch = self.get(batch_id, owner)
            if batch is None:
                return None
            if batch.status not in OPEN:
                raise RequestError(
                    f"the batch {batch_id} is {batch.status.value} and cannot be cancelled",
                    status=409,
                    code="batch_ended",
                )
            if batch.status is not BatchState.CANCELLING:
                self._step(batch, BatchStep.CANCEL, now)
        return self.get(batch_id)

    def take_lease(self, now: float) -> bool:
        """Take or renew the lease for `lease_s`; return whether this process holds it."""
        with transaction(self._connection):
            row = self._connection.execute("SELECT holder, until FROM lease").fetchone()
            # If the clock was set back, a dead holder's lease must not last forever.
            is_over = row is None or not now <= row["until"] <= now + 2 * self._config.lease_s
            if not is_over and row["holder"] != self._holder:
                return False
            self._connection.execute(
                "INSERT OR REPLACE INTO lease (one, holder, until) VALUES (1, ?, ?)",
                (self._holder, now + self._config.lease_s),
            )
        return True

    def give_lease_back(self) -> None:
        """Release the lease, so that another process can run batches at once."""
        with transaction(self._connection):
            self._connection.execute("DELETE FROM lease WHERE holder = ?", (self._holder,))

    def advance(self, now: int) -> None:
        """Start, expire and end the batches that are due. Only the lease holder may call this."""
        marks = ", ".join("?" * len(OPEN))
        rows = self._connection.execute(
            f"SELECT * FROM batches WHERE status IN ({marks}) ORDER BY order_number", OPEN
        ).fetchall()
        for batch in map(_record, rows):
            if batch.status is BatchState.CANCELLING:
                self._end(batch, BatchStep.STOP, now)
            elif now >= batch.expires_at:
                self._end(batch, BatchStep.EXPIRE, now)
            elif batch.status is BatchState.VALIDATING:
                self._begin(batch, now)

    def waiting(self, limit: int, resting: Collection[str] = ()) -> list[WaitingLine]:
        """Return lines to run, at most `limit` per owner. Batches with the earliest deadline come
        first, then the oldest. Owners in `resting` are skipped."""
        owners = self._connection.execute(
            "SELECT owner FROM batches WHERE status = ? "
            f"AND owner NOT IN ({', '.join('?' * len(resting))}) "
            "GROUP BY owner ORDER BY min(order_number)",
            (BatchState.IN_PROGRESS, *resting),
        ).fetchall()
        return [
            WaitingLine(*row)
            for (owner,) in owners
            for row in self._connection.execute(
                "SELECT lines.batch_id, number, custom_id, endpoint, body, owner, expires_at "
                "FROM lines JOIN batches ON batches.id = lines.batch_id "
                "WHERE lines.state = ? AND status = ? AND owner = ? "
                "ORDER BY expires_at, order_number, number LIMIT ?",
                (database.WAITING, BatchState.IN_PROGRESS, owner, limit),
            )
        ]

    def is_wanted(self, batch_id: str) -> bool:
        """Return whether a batch's lines should still run."""
        batch = self.get(batch_id)
        return batch is not None and batch.status is BatchState.IN_PROGRESS

    def finish_line(self, line: WaitingLine, result: bytes, now: int, *, is_good: bool) -> bool:
        """Write a line's result if it has none; return whether this call wrote it."""
        with transaction(self._connection):
            lease = self._connection.execute("SELECT holder FROM lease").fetchone()
            if lease is None or lease["holder"] != self._holder:
                return False
            batch = self.get(line.batch_id)
            if batch is None or batch.status is not BatchState.IN_PROGRESS:
                return False
            state = database.ANSWERED if is_good else database.FAILED
            changed = self._connection.execute(
                "UPDATE lines SET state = ?, result = ?, body = NULL "
                "WHERE batch_id = ? AND number = ? AND state = ?",
                (state, result, line.batch_id, line.number, database.WAITING),
            ).rowcount
            if not changed:
                return False
            column = "completed" if is_good else "failed"
            done = self._connection.execute(
                f"UPDATE batches SET {column} = {column} + 1 WHERE id = ? "
                "RETURNING completed + failed = total",
                (line.batch_id,),
            ).fetchone()
            if done[0]:
                self._close(batch, BatchStep.COMPLETE, now)
        return True

    def _begin(self, batch: BatchRecord, now: int) -> None:
        row = self._connection.execute(
            "SELECT content FROM files WHERE id = ?", (batch.input_file_id,)
        ).fetchone()
        checked = check_file(bytes(row["content"]), batch.endpoint, self._config.max_lines)
        with transaction(self._connection):
            present = self.get(batch.id)
            if present is None or present.status is not BatchState.VALIDATING:
                return  # cancelled in the meantime
            if checked.errors:
                self._refuse(batch, checked, now)
                return
            self._connection.executemany(
                "INSERT INTO lines (batch_id, number, custom_id, body) VALUES (?, ?, ?, ?)",
                [(batch.id, n, *line) for n, line in enumerate(checked.lines)],
            )
            self._connection.execute(
                "UPDATE batches SET total = ? WHERE id = ?", (len(checked.lines), batch.id)
            )
            self._step(batch, BatchStep.BEGIN, now)

    def _refuse(self, batch: BatchRecord, checked: CheckedFile, now: int) -> None:
        errors = [
            {"code": error.code, "message": error.message, "param": None, "line": error.line}
            for error in checked.errors
        ]
        self._connection.execute(
            "UPDATE batches SET errors = ? WHERE id = ?", (json.dumps(errors), batch.id)
        )
        self._step(batch, BatchStep.REFUSE, now)

    def _end(self, batch: BatchRecord, step: BatchStep, now: int) -> None:
        """End a batch before all of its lines have results. The others fail with the reason."""
        code, message = _UNDONE[step]
        with transaction(self._connection):
            rows = self._connection.execute(
                "SELECT number, custom_id FROM lines WHERE batch_id = ? AND state = ?",
                (batch.id, database.WAITING),
            ).fetchall()
            for number, custom_id in rows:
                told = error_line(line_id(batch.id, number), custom_id, code, message)
                self._connection.execute(
                    "UPDATE lines SET state = ?, body = NULL, result = ? "
                    "WHERE batch_id = ? AND number = ?",
                    (database.FAILED, told, batch.id, number),
                )
            self._connection.execute(
                "UPDATE batches SET failed = failed + ? WHERE id = ?", (len(rows), batch.id)
            )
            self._close(batch, step, now)

    def _close(self, batch: BatchRecord, step: BatchStep, now: int) -> None:
        """Move to the final state, and publish the results as files."""
        self._step(batch, step, now)
        for name, state in ((OUTPUT, database.ANSWERED), (ERRORS, database.FAILED)):
            count, size = self._connection.execute(
                "SELECT count(*), coalesce(sum(length(result)), 0) FROM lines "
                "WHERE batch_id = ? AND state = ?",
                (batch.id, state),
            ).fetchone()
            if not count:
                continue
            file_id = f"file-{name}-{batch.id.removeprefix('batch_')}"
            self._connection.execute(
                "INSERT INTO files (id, owner, created_at, filename, purpose, bytes, batch_id, "
                "state) SELECT ?, owner, ?, ?, 'batch_output', ?, id, ? FROM batches WHERE id = ?",
                (file_id, now, f"{batch.id}_{name}.jsonl", size, state, batch.id),
            )
            self._connection.execute(
                f"UPDATE batches SET {name}_file_id = ? WHERE id = ?", (file_id, batch.id)
            )

    def _step(self, batch: BatchRecord, step: BatchStep, now: int) -> None:
        state = after(batch.status, step)
        self._connection.execute(
            f"UPDATE batches SET status = ?, {_TIME_OF[state]} = ? WHERE id = ?",
            (state, now, batch.id),
        )


def line_id(batch_id: str, number: int) -> str:
    """Return the id of a line's result."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


def _record(row: sqlite3.Row) -> BatchRecord:
    return BatchRecord(
        id=row["id"],
        status=BatchState(row["status"]),
        endpoint=row["endpoint"],
        input_file_id=row["input_file_id"],
        completion_window=row["window"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        metadata=None if row["metadata"] is None else json.loads(row["metadata"]),
        errors=None if row["errors"] is None else json.loads(row["errors"]),
        **{column: row[column] for column in _TIME_OF.values()},
        output_file_id=row["output_file_id"],
        error_file_id=row["error_file_id"],
        request_counts=Counts(row["total"], row["completed"], row["failed"]),
    )
