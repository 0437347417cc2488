"""Check that a worker writes KV and runs steps only for the current owner of the blocks.

The product enforces ownership; this check does not rely on its tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from decode.core import DecodeCore
from transport.frames import KvChunk
from triolet.units import MILLISECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefill.core import PrefillCore
    from transport.frames import AnyFrame
    from triolet.config import LinkConfig
    from triolet.ids import AttemptKey
    from worker.attempt_table import TableMember

    from .process import Process

SLACK_S: Final = 50 * MILLISECONDS


class Overseer:
    """Watches one epoch of one worker.

    Args:
      process: process of the worker, with the time for which it was stopped.
      core: its state machine.
      link: config with the lifetimes of leases.
      report: called with a description of each violation.
    """

    def __init__(
        self,
        process: Process,
        core: PrefillCore | DecodeCore,
        link: LinkConfig,
        report: Callable[[str], None],
    ) -> None:
        self._process = process
        self._core = core
        self._link = link
        self._report = report
        self._watch_leases()
        if isinstance(core, DecodeCore):
            self._watch_kv(core)

    def look_at_step(self, now: float) -> None:
        """Check at the start of a step that every row has an unexpired lease."""
        for key in self._core.attempt_table._in_step:
            self._check_lease(key, now, "computed")

    def _watch_leases(self) -> None:
        """Check that no ended attempt gets a second lease."""
        add = self._core.attempt_table.add
        seen_at: dict[AttemptKey, float] = {}  # kept as long as tombstones

        def add_once(attempt: TableMember, now: float, remaining_s: float) -> None:
            if attempt.key in seen_at:
                self._report(f"{self._process} leased {attempt.key} for the second time")
            seen_at[attempt.key] = now
            while now - seen_at[oldest := next(iter(seen_at))] > self._link.tombstone_s:
                del seen_at[oldest]
            add(attempt, now, remaining_s)  # type: ignore[arg-type]

        self._core.attempt_table.add = add_once  # type: ignore[method-assign]

    def _watch_kv(self, core: DecodeCore) -> None:
        take = core.on_kv

        def on_kv(
            sender: bytes, frame: AnyFrame, payload: bytes | memoryview | None, now: float
        ) -> None:
            num_bytes = core.counters.kv_bytes
            if isinstance(frame, KvChunk):
                lease = core.attempt_table.leases.get(frame.key)
                expires_at = None if lease is None else lease.expires_at
            take(sender, frame, payload, now)
            if isinstance(frame, KvChunk) and core.counters.kv_bytes != num_bytes:
                if frame.target_epoch != core._identity.me.epoch:
                    self._report(
                        f"KV for another epoch of {self._process} was written: {frame.key}"
                    )
                self._check_expiry(frame.key, expires_at, now, "took KV")

        core.on_kv = on_kv  # type: ignore[method-assign]

    def _check_lease(self, key: AttemptKey, now: float, what: str) -> None:
        lease = self._core.attempt_table.leases.get(key)
        self._check_expiry(key, None if lease is None else lease.expires_at, now, what)

    def _check_expiry(
        self, key: AttemptKey, expires_at: float | None, now: float, what: str
    ) -> None:
        if expires_at is None:
            self._report(f"{self._process} {what} for {key}, which has no lease")
        elif now - expires_at > self._patience_s(now):
            late_s = now - expires_at
            self._report(f"{self._process} {what} for {key}, {late_s:.2f} s after its lease")

    def _patience_s(self, now: float) -> float:
        """Return how long a lease may be used after its expiry: until the next sweep, or longer for
        a process that was stopped for less than a lease's lifetime."""
        patience_s = self._link.sweep_interval_s + SLACK_S
        stopped_s = self._process.stopped_s
        was_just_stopped = now - self._process.away_until <= patience_s
        if was_just_stopped and stopped_s <= self._link.lease_ttl_s:
            return patience_s + stopped_s
        return patience_s
