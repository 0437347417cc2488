"""Checks invariants while a simulation runs: workers write KV and run steps only for the current
owner of the blocks, and servers start attempts only on workers that requests may use.

The product enforces ownership and zones; these checks do not use its tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from decode.core import DecodeCore
from server.scheduling.routing import Need, _admitted
from transport.frames import KvChunk
from triolet.ids import Role
from triolet.units import MILLISECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prefill.core import PrefillCore
    from server.scheduling.links import Links
    from server.scheduling.request import Request
    from server.scheduling.routing import Route
    from server.scheduling.workers import Worker
    from transport.frames import AnyFrame
    from triolet.config import ServerConfig
    from triolet.ids import AttemptKey
    from worker.attempt_table import TableMember

    from .process import Process, Surroundings

SLACK_S: Final = 50 * MILLISECONDS


class Overseer:
    """Watches one epoch of one worker.

    Args:
      process: the worker's process, which knows how long it was stopped.
      core: its state machine.
      around: state shared by all processes: lifetimes, zones, and the record of violations.
      zone: the worker's zone.
    """

    def __init__(
        self,
        process: Process,
        core: PrefillCore | DecodeCore,
        around: Surroundings,
        *,
        zone: str,
    ) -> None:
        self._process = process
        self._core = core
        self._link = around.link
        self._report = around.report
        self._zones_of = around.zones_of
        self._zone = zone
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
            zones = self._zones_of(attempt.key.request_id)
            if zones and self._zone not in zones:
                self._report(f"{self._process} got {attempt.key}, which is bound to {set(zones)}")
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


class RouteOverseer:
    """Watches one life of a server: which workers it excludes, and how much work a returning zone
    gets.

    Args:
      name: of the server.
      fleet: its links.
      config: its settings.
      report: called with a sentence for each violation.
    """

    def __init__(
        self, name: str, fleet: Links, config: ServerConfig, report: Callable[[str], None]
    ) -> None:
        self._name = name
        self._workers: Sequence[Worker] = fleet._workers
        self._recovery = config.recovery
        self._report = report
        # Evicted zones, and the time since which each answers again.
        self._back_at: dict[str, float | None] = {}
        attempts, recovery = fleet._requests._attempts, fleet._requests.recovery
        begin, sweep = attempts._begin, recovery.sweep

        def begin_watched(
            request: Request, route: Route, now: float, *, is_over_share: bool
        ) -> None:
            is_free = not request.is_input and not request.spec.scheduling.placement.zones
            if is_free and route.fork_of is None:
                self._check_share(route.pair.decode, now)
            begin(request, route, now, is_over_share=is_over_share)

        def sweep_watched(now: float) -> None:
            sweep(now)
            self._note_zones(now)

        attempts._begin = begin_watched  # type: ignore[method-assign]
        recovery.sweep = sweep_watched  # type: ignore[method-assign]

    def look(self) -> None:
        """Check that at most half of the workers of each role are excluded."""
        for role in (Role.PREFILL, Role.DECODE):
            pool = [one for one in self._workers if one.role is role and one.is_usable]
            num_left = len(_admitted(pool, role, Need(1, 1)))
            if num_left < len(pool) - len(pool) // 2:
                self._report(f"{self._name} uses only {num_left} of {len(pool)} {role} workers")

    def _note_zones(self, now: float) -> None:
        """Record which zones are silent while others are not, and which answer again."""
        serving = {
            one.site.zone for one in self._workers if one.role is Role.DECODE and one.is_connected
        }.difference(self._back_at)
        for zone in {one.site.zone for one in self._workers if one.site.zone}:
            members = [one for one in self._workers if one.site.zone == zone]
            silences = [one.monitor.silence_s(now) for one in members if one.is_missed]
            if serving <= {zone}:
                self._back_at.pop(zone, None)
            elif any(one.is_connected for one in members):
                if zone in self._back_at:
                    self._back_at[zone] = self._back_at[zone] or now
            elif silences and min(silences) >= self._recovery.zone_evict_s:
                self._back_at[zone] = None

    def _check_share(self, decode: Worker, now: float) -> None:
        """Check that a returning zone gets no more than its first share (one request of four rows)
        while another zone has a worker."""
        back_at = self._back_at.get(decode.site.zone, 0.0)
        is_first = back_at is None or now - back_at < self._recovery.zone_return_s / 2
        others = {
            one.site.zone
            for one in self._workers
            if one.role is Role.DECODE and one.is_usable and one.breaker.is_whole
        }
        is_held = decode.site.zone in self._back_at and is_first
        if is_held and decode.shares and not others <= self._back_at.keys():
            self._report(f"{self._name} gives {decode} more than its share: its zone returns")
