"""Collect a worker's report for a fleet audit: blocks, leases and attempts.

Read-only: does not sweep, free or count. Inconsistencies are reported as text, so that an
inconsistent worker can still report them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from transport.frames import CacheLoad
from transport.lease import LeaseState
from triolet.audit import (
    MAX_AUDIT_LEASES,
    LeaseAudit,
    PoolAudit,
    ProcessFacts,
    WindowsAudit,
    WorkerAudit,
)
from triolet.ids import shown_epoch

from .attempt_table import TableMember

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.block_ledger import BlockLedger
    from engine.prefix_cache import PrefixCache
    from transport.lease import Lease
    from triolet.config import LinkConfig
    from triolet.ids import AttemptKey

    from .attempt_table import AttemptTable
    from .counters import Counters
    from .identity import Identity

A = TypeVar("A", bound=TableMember)

_WITH_ROW = (LeaseState.READY, LeaseState.RUNNING)


def worker_account(
    identity: Identity,
    link: LinkConfig,
    cache: PrefixCache,
    attempt_table: AttemptTable[A],
    counters: Counters,
    now: float,
    *,
    is_draining: bool,
    windows: WindowsAudit | None = None,
    allowed: Callable[[AttemptKey], int | None] = lambda _: None,
    process: ProcessFacts | None = None,
    draft: BlockLedger | None = None,
) -> WorkerAudit:
    """Return the worker's account for the fleet's invariants.

    Args:
      identity: identity of this worker.
      link: lifetime of leases.
      cache: blocks and their leases.
      attempt_table: live attempts.
      counters: counters of this worker.
      now: current time.
      is_draining: whether it accepts no new work.
      windows: KV on its way out.
      allowed: how far an attempt may run, where known.
      process: facts from the operating system.
      draft: leases of a draft model's pool.
    """
    audit = WorkerAudit(
        role=identity.me.role,
        name=identity.me.name,
        epoch=shown_epoch(identity.me.epoch),
        lease_ttl_s=link.lease_ttl_s,
        is_draining=is_draining,
        pool=_pool(cache.ledger, cache.check_invariants),
        leases=_listed(attempt_table, cache.ledger, link, allowed, now),
        num_leases=len(attempt_table.leases),
        granted=attempt_table.granted,
        ended={reason.value: count for reason, count in attempt_table.ended.items()},
        verdict=verdict_of(attempt_table.check_agreement),
        leaving=len(attempt_table.leaving),
        leaving_blocks=sum(_held(cache.ledger, key) for key in attempt_table.leaving),
        tombstones=attempt_table.leases.num_tombstones,
        max_tombstones=link.max_tombstones,
        rows=attempt_table.num_rows,
        running=sum(attempt_table.leases.count(state) for state in _WITH_ROW),
        paused=attempt_table.leases.count(LeaseState.PAUSED),
        max_num_seqs=identity.capacity.max_num_seqs,
        windows=windows or WindowsAudit(),
        process=process or ProcessFacts(),
        draft_pool=None if draft is None else _pool(draft, draft.check_invariants),
    )
    return _with_work(audit, counters)


def _with_work(audit: WorkerAudit, counters: Counters) -> WorkerAudit:
    return replace(
        audit,
        late_rows=counters.late_rows,
        steps=counters.steps,
        computed_tokens=counters.computed_tokens,
        kv_bytes=counters.kv_bytes,
        dropped=counters.dropped_by_reason(),
        bad_digests=counters.bad_digests,
        preemptions=counters.preemptions,
        prompt_tokens=counters.prompt_tokens,
        late_tokens=counters.late_tokens,
    )


def verdict_of(check: Callable[[], object]) -> str:
    """Return what a check that asserts found wrong; empty if nothing."""
    try:
        check()
    except AssertionError as error:
        return str(error) or "an assertion failed"
    return ""


def cache_load(cache: PrefixCache) -> CacheLoad:
    """Return the prefix cache's part of a heartbeat."""
    counts = cache.counts
    return CacheLoad(
        queried_tokens=counts.queried_tokens,
        hit_tokens=counts.hit_tokens,
        evicted_blocks=counts.evicted_blocks,
        spilled_blocks=counts.spilled_blocks,
        restored_blocks=counts.restored_blocks,
        host_bytes=cache.host_bytes,
        tenants=cache.ledger.cached.num_tenants,
    )


def _pool(ledger: BlockLedger, check: Callable[[], object]) -> PoolAudit:
    return PoolAudit(
        total_blocks=ledger.total_blocks,
        free_blocks=ledger.free_blocks,
        leased_blocks=ledger.leased_blocks,
        cached_blocks=ledger.cached_blocks,
        references=ledger.num_references,
        verdict=verdict_of(check),
        spoiled_blocks=ledger.num_spoiled,
    )


def _listed(
    attempt_table: AttemptTable[A],
    ledger: BlockLedger,
    link: LinkConfig,
    allowed: Callable[[AttemptKey], int | None],
    now: float,
) -> tuple[LeaseAudit, ...]:
    oldest = attempt_table.leases.leases()[:MAX_AUDIT_LEASES]
    return tuple(
        _lease(lease, attempt_table, ledger, link, allowed(lease.key), now) for lease in oldest
    )


def _lease(
    lease: Lease,
    attempt_table: AttemptTable[A],
    ledger: BlockLedger,
    link: LinkConfig,
    allowed: int | None,
    now: float,
) -> LeaseAudit:
    attempt = attempt_table.attempts.get(lease.key)
    return LeaseAudit(
        attempt=str(lease.key),
        server=str(lease.owner),
        state=lease.state.value,
        num_blocks=_held(ledger, lease.key),
        age_s=now - lease.granted_at,
        renewed_ago_s=now + link.lease_ttl_s - lease.expires_at,
        remaining_s=lease.deadline - now,
        num_tokens=0 if attempt is None else attempt.num_output_tokens,
        allowed=allowed,
    )


def _held(ledger: BlockLedger, key: AttemptKey) -> int:
    return len(ledger.blocks_of(key)) if ledger.has_lease(key) else 0
