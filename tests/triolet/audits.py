"""Audits of a small healthy fleet, for tests that corrupt one field at a time."""

from __future__ import annotations

from msgspec.structs import replace

from triolet.audit import (
    AttemptAudit,
    FleetAudit,
    LeaseAudit,
    PoolAudit,
    ProcessFacts,
    ServerAudit,
    WindowsAudit,
    WorkerAudit,
    WorkerView,
)
from triolet.ids import Role

ATTEMPT = "00" * 16 + "/0"
OTHER_ATTEMPT = "11" * 16 + "/0"
SERVER = "server@00000000000000aa"
FACTS = ProcessFacts(pid=7, open_fds=20, threads=5, tasks=9, rss_bytes=2**20)


def a_lease(**changes: object) -> LeaseAudit:
    """Return the lease of a running request."""
    lease = LeaseAudit(
        attempt=ATTEMPT,
        server=SERVER,
        state="running",
        num_blocks=4,
        age_s=30.0,
        renewed_ago_s=0.4,
        remaining_s=570.0,
        num_tokens=50,
        allowed=64,
    )
    return replace(lease, **changes)


def a_worker(**changes: object) -> WorkerAudit:
    """Return a decode worker with one running request."""
    worker = WorkerAudit(
        role=Role.DECODE,
        name="decode-0",
        epoch="00000000000000dd",
        lease_ttl_s=2.0,
        is_draining=False,
        pool=PoolAudit(
            total_blocks=100, free_blocks=90, leased_blocks=4, cached_blocks=6, references=4
        ),
        leases=(a_lease(),),
        num_leases=1,
        granted=10,
        ended={"stop": 6, "cancel": 3},
        late_rows=3,
        tombstones=9,
        max_tombstones=100,
        rows=1,
        running=1,
        max_num_seqs=8,
        windows=WindowsAudit(ring_size_bytes=64),
        process=FACTS,
    )
    return replace(worker, **changes)


def an_idle_worker(**changes: object) -> WorkerAudit:
    """Return the same worker after its request has ended."""
    pool = PoolAudit(
        total_blocks=100, free_blocks=94, leased_blocks=0, cached_blocks=6, references=0
    )
    ended = {"stop": 7, "cancel": 3}
    return a_worker(
        **{"pool": pool, "leases": (), "num_leases": 0, "ended": ended, "rows": 0, **changes}
    )


def an_attempt(**changes: object) -> AttemptAudit:
    """Return the server's count of the running request."""
    return replace(AttemptAudit(ATTEMPT, is_asked=True, is_granted=True, is_wanted=True), **changes)


def available(audit: WorkerAudit) -> int:
    """Return the blocks that the server should count as available."""
    return audit.pool.free_blocks + audit.pool.cached_blocks


def a_view(audit: WorkerAudit | None, **changes: object) -> WorkerView:
    """Return the worker as seen by its server."""
    attempts = (an_attempt(),) if audit is not None and audit.leases else ()
    view = WorkerView(
        role=Role.DECODE,
        address="ipc:///d",
        name="decode-0",
        state="alive",
        epoch="00000000000000dd",
        silence="",
        audit=audit,
        before=attempts,
        after=attempts,
        available_blocks=0 if audit is None else available(audit),
    )
    return replace(view, **changes)


def a_server(**changes: object) -> ServerAudit:
    """Return a server with one running and one waiting request."""
    server = ServerAudit(
        name="server",
        epoch="00000000000000aa",
        received=13,
        accepted=11,
        rejected={"overloaded": 2},
        ended={"stop": 6, "client_gone": 3},
        in_flight=2,
        waiting=1,
        running=1,
        overdue_s=-570.0,
        connections=2,
        process=FACTS,
    )
    return replace(server, **changes)


def an_idle_server(**changes: object) -> ServerAudit:
    """Return the same server after its requests have ended."""
    ended = {"stop": 8, "client_gone": 3}
    return a_server(**{"ended": ended, "in_flight": 0, "waiting": 0, "running": 0, **changes})


def a_fleet(
    worker: WorkerAudit | None = None, server: ServerAudit | None = None, **view: object
) -> FleetAudit:
    """Return a busy fleet."""
    views = (a_view(worker or a_worker(), **view),)
    return FleetAudit(grace_s=2.0, server=server or a_server(), workers=views)


def an_idle_fleet(
    worker: WorkerAudit | None = None, server: ServerAudit | None = None, **view: object
) -> FleetAudit:
    """Return a fleet at rest."""
    return a_fleet(worker or an_idle_worker(), server or an_idle_server(), **view)
