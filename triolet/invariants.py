"""Check the invariants of a fleet in an audit, while it runs and when it is idle.

No I/O and no clock. The processes of a live fleet do not report at exactly the same time, so a
difference that a frame in flight may explain is a violation only if it lasts longer than a lease.

        I1  every block is free, leased or cached; references equal the blocks that leases name
        I2  no lease without a live request of a live server
        I3  every granted lease is alive or has ended once
        I6  an attempt that ended costs at most the step that computed it
        I7  windows and rows stay within their bounds; at rest everything has been given back
        I8  no process writes into a freed block (where freed blocks are poisoned)
        I9  received == accepted + rejected; accepted == ended + in flight
        I10 no request outlives its deadline

Tokens and terminal events (I4, I5) are checked in clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .ids import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .audit import FleetAudit, LeaseAudit, ProcessFacts, ServerAudit, WorkerAudit, WorkerView


class Violation(msgspec.Struct, frozen=True):
    """A broken invariant.

    Attributes:
      invariant: its number, such as `I2`.
      where: name of the process.
      what: what was seen, in numbers and names.
      meaning: its consequence.
      remedy: what an operator should do.
    """

    invariant: str
    where: str
    what: str
    meaning: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.where}: {self.what} ({self.meaning})"


_REPORT = "keep its log and `triolet doctor --ledger URL --json`, and report both"
_RESTART = f"restart this worker: its requests continue elsewhere; before that {_REPORT}"


def check_invariants(audit: FleetAudit) -> list[Violation]:
    """Return everything that is wrong with a running fleet."""
    found = list(_accounts(audit.server, audit.grace_s))
    for view in audit.workers:
        found += _named_for_nobody(view)
        if view.audit is None:
            continue
        found += _blocks(view.audit)
        found += _lease_times(view.audit, audit.grace_s)
        # A lease that the server has forgotten lives until it expires.
        found += _lasting_doubts(view, view.audit.lease_ttl_s + audit.grace_s)
        found += _lease_ends(view.audit)
        found += _bounds(view.audit)
    for sibling in audit.siblings:
        # Its workers are the same; only its own counters differ.
        found += _accounts(sibling.server, sibling.grace_s)
        for view in sibling.workers:
            found += _named_for_nobody(view)
            if view.audit is not None:
                found += _lasting_doubts(view, view.audit.lease_ttl_s + sibling.grace_s)
    return found


def check_at_rest(audit: FleetAudit, before: FleetAudit | None = None) -> list[Violation]:
    """Return everything that was not given back although nothing should be running.

    Args:
      audit: audit of a fleet that has had no clients for several lease lifetimes.
      before: audit of the same processes and epochs at an earlier rest; growth since is a leak.
        Both need the same number of client connections.
    """
    found = check_invariants(audit)
    server = audit.server
    if server.in_flight:
        found.append(_left(server.name, f"{server.in_flight} requests in flight"))
    for view in audit.workers:
        if view.audit is None:
            found.append(_left(view.name, f"no audit: {view.silence}"))
            continue
        found += _still_held(view, view.audit)
    if before is not None:
        found += _grown(server.name, server.process, before.server.process)
        lives = {(worker.name, worker.epoch): worker for worker in before.answered}
        for worker in audit.answered:
            earlier = lives.get((worker.name, worker.epoch))
            if earlier is not None:
                found += _grown(worker.name, worker.process, earlier.process)
    return found


def _accounts(server: ServerAudit, grace_s: float) -> Iterator[Violation]:
    rejected, ended = sum(server.rejected.values()), sum(server.ended.values())
    if server.received != server.accepted + rejected:
        yield Violation(
            "I9",
            server.name,
            f"{server.received} requests received, {server.accepted} accepted, {rejected} rejected",
            "a request got no answer, or two answers",
            _REPORT,
        )
    if server.accepted != ended + server.in_flight:
        yield Violation(
            "I9",
            server.name,
            f"{server.accepted} requests accepted, {ended} ended, {server.in_flight} in flight",
            "a request was lost, or ended twice",
            _REPORT,
        )
    if server.in_flight != server.waiting + server.running:
        yield Violation(
            "I9",
            server.name,
            f"{server.in_flight} requests in flight, {server.waiting} wait, "
            f"{server.running} have an attempt",
            "a request neither waits nor runs and will never end",
            _REPORT,
        )
    if server.overdue_s > grace_s:
        yield Violation(
            "I10",
            server.name,
            f"a request is {server.overdue_s:.1f} s past its deadline",
            "its client waits in vain",
            "restart this server if this persists; workers free its blocks within seconds",
        )


def _named_for_nobody(view: WorkerView) -> Iterator[Violation]:
    for attempt in view.after:
        if not attempt.is_wanted:
            yield Violation(
                "I2",
                view.name,
                f"the server counts attempt {attempt.attempt} there, but it belongs to no request",
                "its lease is renewed forever and its blocks are never freed",
                "restart the server: the lease then expires by itself",
            )


def _blocks(worker: WorkerAudit) -> Iterator[Violation]:
    pool = worker.pool
    counted = pool.free_blocks + pool.leased_blocks + pool.cached_blocks
    if counted != pool.total_blocks:
        yield Violation(
            "I1",
            worker.name,
            f"{pool.free_blocks} blocks free, {pool.leased_blocks} leased and "
            f"{pool.cached_blocks} cached make {counted}, not {pool.total_blocks}",
            "blocks are lost, or a block has two owners",
            _RESTART,
        )
    if pool.verdict:
        yield Violation(
            "I1",
            worker.name,
            f"the ledger reports: {pool.verdict}",
            "one request's KV may be overwritten by another's",
            _RESTART,
        )
    if pool.references < pool.leased_blocks:
        yield Violation(
            "I1",
            worker.name,
            f"{pool.leased_blocks} blocks are leased and all leases together name "
            f"{pool.references}",
            "blocks without an owner are never freed",
            _RESTART,
        )
    held = sum(lease.num_blocks for lease in worker.leases) + worker.leaving_blocks
    if held > pool.references or (held < pool.references and not worker.is_cut):
        yield Violation(
            "I1",
            worker.name,
            f"attempts hold {held} blocks and the ledger counts {pool.references}",
            "blocks belong to an attempt that has ended",
            _RESTART,
        )
    if pool.spoiled_blocks:
        yield Violation(
            "I8",
            worker.name,
            f"{pool.spoiled_blocks} free blocks were written after they were freed",
            "KV is written for an attempt that no longer owns the block",
            _RESTART,
        )


def _lease_times(worker: WorkerAudit, grace_s: float) -> Iterator[Violation]:
    for lease in worker.leases:
        if lease.renewed_ago_s > worker.lease_ttl_s + grace_s:
            yield Violation(
                "I2",
                worker.name,
                f"{_described(lease)} was last named by {lease.server} "
                f"{lease.renewed_ago_s:.1f} s ago",
                f"it should have expired after {worker.lease_ttl_s:g} s",
                _RESTART,
            )
        if lease.remaining_s < -grace_s:
            yield Violation(
                "I2",
                worker.name,
                f"{_described(lease)} is {-lease.remaining_s:.1f} s past its deadline",
                "its request ended long ago",
                _RESTART,
            )
        if lease.allowed is not None and lease.num_tokens > max(lease.allowed, 1):
            yield Violation(
                "I7",
                worker.name,
                f"{_described(lease)} has {lease.num_tokens} tokens and was allowed "
                f"{lease.allowed}",
                "it runs ahead of its reader",
                _REPORT,
            )


def _lasting_doubts(view: WorkerView, patience_s: float) -> Iterator[Violation]:
    for doubt in view.unknown:
        if doubt.for_s > patience_s:
            yield Violation(
                "I2",
                view.name,
                f"attempt {doubt.attempt} holds a lease of this server, which has not known it for "
                f"{doubt.for_s:.1f} s",
                "blocks are held for a request that is over",
                _RESTART,
            )
    for doubt in view.missing:
        if doubt.for_s > patience_s:
            yield Violation(
                "I10",
                view.name,
                f"the server waits for attempt {doubt.attempt}, which has had no lease there for "
                f"{doubt.for_s:.1f} s",
                "its client waits for tokens that no worker computes",
                "restart this worker, or wait for the request's deadline",
            )


def _lease_ends(worker: WorkerAudit) -> Iterator[Violation]:
    ended = sum(worker.ended.values())
    alive = worker.num_leases + worker.leaving
    if worker.granted != ended + alive:
        yield Violation(
            "I3",
            worker.name,
            f"{worker.granted} leases granted, {ended} ended, {alive} alive",
            "a lease ended twice, or vanished without an end",
            _RESTART,
        )
    if worker.verdict:
        yield Violation(
            "I3",
            worker.name,
            f"leases and attempts disagree: {worker.verdict}",
            "an attempt without a lease, or a lease without an attempt",
            _RESTART,
        )
    if worker.late_rows > ended:
        yield Violation(
            "I6",
            worker.name,
            f"{worker.late_rows} rows were computed for attempts that had ended; {ended} ended",
            "attempts are still computed after their end",
            _RESTART,
        )


def _bounds(worker: WorkerAudit) -> Iterator[Violation]:
    if worker.windows.verdict:
        yield Violation(
            "I7",
            worker.name,
            f"KV under way does not add up: {worker.windows.verdict}",
            "the window shrinks or grows with each transfer",
            _RESTART,
        )
    if worker.draft_pool is not None and worker.draft_pool.verdict:
        yield Violation(
            "I1",
            worker.name,
            f"the draft model's ledger reports: {worker.draft_pool.verdict}",
            "guesses fail more often than they should; answers stay correct",
            _RESTART,
        )
    if worker.role is Role.DECODE and worker.rows > worker.max_num_seqs:
        yield Violation(
            "I7",
            worker.name,
            f"{worker.rows} sequences in one step; {worker.max_num_seqs} fit",
            "the step is larger than its limit",
            _REPORT,
        )
    if worker.tombstones > worker.max_tombstones:
        yield Violation(
            "I7",
            worker.name,
            f"{worker.tombstones} ended requests are remembered; limit: {worker.max_tombstones}",
            "memory grows with every request",
            _RESTART,
        )


def _still_held(view: WorkerView, worker: WorkerAudit) -> Iterator[Violation]:
    pool, windows = worker.pool, worker.windows
    for count, what in (
        (worker.num_leases, "leases"),
        (worker.leaving, "attempts on their way out"),
        (pool.leased_blocks, "leased blocks"),
        (0 if worker.draft_pool is None else worker.draft_pool.leased_blocks, "draft blocks"),
        (worker.rows, "rows in a step"),
        (windows.kv_under_way_bytes, "bytes of KV under way"),
        (windows.ring_bytes, "bytes in the ring"),
        (len(view.after), "attempts that the server counts there"),
    ):
        if count:
            yield _left(worker.name, f"{count} {what}")
    available_blocks = pool.free_blocks + pool.cached_blocks
    if view.available_blocks != available_blocks:
        yield Violation(
            "I7",
            worker.name,
            f"the server counts {view.available_blocks} available blocks, but there are "
            f"{available_blocks}, at rest",
            "requests wait although there is room, or are sent where there is none",
            _REPORT,
        )


def _grown(name: str, process: ProcessFacts, before: ProcessFacts) -> Iterator[Violation]:
    for now, then, what in (
        (process.open_fds, before.open_fds, "open files"),
        (process.threads, before.threads, "threads"),
        (process.tasks, before.tasks, "tasks"),
    ):
        if now is not None and then is not None and now > then:
            yield Violation(
                "I7",
                name,
                f"{now} {what}; there were {then} at rest before",
                "every request leaks something",
                _REPORT,
            )


def _left(name: str, what: str) -> Violation:
    meaning = "something of an ended request was not released"
    return Violation("I7", name, f"{what}, at rest", meaning, _REPORT)


def _described(lease: LeaseAudit) -> str:
    return (
        f"attempt {lease.attempt} ({lease.state}, {lease.num_blocks} blocks, "
        f"{lease.age_s:.1f} s old)"
    )
