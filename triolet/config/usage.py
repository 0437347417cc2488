"""Bounds of the usage ledger, with reasons."""

from __future__ import annotations

from dataclasses import dataclass

from ..units import SECONDS
from .limits import Count, Positive  # noqa: TC001 (get_type_hints reads the annotations)


@dataclass(frozen=True, slots=True)
class UsageConfig:
    """The usage ledger: one record for each request that ended."""

    directory: str | None = None
    """Where the database is; None for no ledger. Off by default, because what outlives a process
    shall be where its operator wants it."""
    max_queued: Count = 65_536
    """Records that wait to be written, with some 500 bytes each: six seconds of 10,000 requests a
    second. Beyond it records are dropped and counted; requests never wait for the ledger."""
    batch_records: Count = 1000
    """Of one transaction. It takes some 10 ms, for which the other servers of a port wait with
    theirs."""
    interval_s: Positive = 1.0 * SECONDS
    """How often records are written. A server that is killed loses as much."""
    busy_s: Positive = 1.0 * SECONDS
    """How long a transaction waits for another process's; then it is tried again after the next
    interval, and its records are kept meanwhile."""
    close_s: Positive = 2.0 * SECONDS
    """For the last records when a server ends: below `exit_grace_s`."""
    retention_days: Count = 400
    """After which records are deleted: a year of bills, and a month to compare."""
