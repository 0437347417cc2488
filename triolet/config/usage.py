"""Bounds of the usage ledger, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from ..units import SECONDS
from .limits import Count, Positive  # noqa: TC001 (get_type_hints reads the annotations)


@dataclass(frozen=True, slots=True)
class UsageConfig:
    """The usage ledger: one record for each ended request."""

    directory: str | None = None
    """Folder of the database; None for no ledger. Off by default: the operator decides where data
    that outlives a process is stored."""
    max_queued: Count = 65_536
    """Records that wait to be written, about 500 bytes each: six seconds of 10,000 requests a
    second. Beyond this, records are dropped and counted; requests never wait for the ledger."""
    batch_records: Count = 1000
    """Records of one transaction. It takes about 10 ms, during which the other servers of the port
    wait."""
    interval_s: Positive = 1.0 * SECONDS
    """Interval at which records are written. A killed server loses this much."""
    busy_s: Positive = 1.0 * SECONDS
    """How long a transaction waits for another process's; then it is retried after the next
    interval, and its records are kept."""
    close_s: Positive = 2.0 * SECONDS
    """For the last records when a server ends: shorter than `exit_grace_s`."""
    retention_days: Count = 400
    """Days after which records are deleted: a year of bills, and a month to compare."""
