"""Data types of a fleet audit: the blocks, leases and requests that each process reports.

The AUDITED frame and JSON have the same form (maps by field name). invariants.py checks that the
numbers of all processes are consistent. The log of administrative actions is separate: ops/audit.

Every field is needed by a check or shows an operator where to look. Ids are text, as in logs. Times
are durations, so that clocks of different processes are never compared.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec

from .ids import Role  # noqa: TC001 (msgspec reads the annotations)

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_SECONDS = 1e9
"""Thirty years: excludes infinity and NaN."""
MAX_WORDS = 64
"""Kinds of ends, drops and error codes: a small known set."""
MAX_AUDIT_LEASES = 4096
"""Leases that a worker lists in an audit, oldest first: a megabyte, and a leaked lease is always
among them. The total number is reported separately."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]
Id: TypeAlias = Annotated[str, msgspec.Meta(max_length=128)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)]
Counts: TypeAlias = Annotated[dict[Id, Count], msgspec.Meta(max_length=MAX_WORDS)]


class ProcessFacts(msgspec.Struct, frozen=True):
    """What the operating system and Trio report about a process; None where unknown.

    Attributes:
      pid: process id.
      open_fds: open files, including sockets.
      threads: number of threads of the process.
      tasks: Trio tasks alive.
      rss_bytes: resident memory.
    """

    pid: Count | None = None
    open_fds: Count | None = None
    threads: Count | None = None
    tasks: Count | None = None
    rss_bytes: Count | None = None


class PoolAudit(msgspec.Struct, frozen=True):
    """The blocks of one worker (I1).

    Attributes:
      total_blocks: blocks that can be leased.
      free_blocks: blocks without content.
      leased_blocks: blocks in at least one lease.
      cached_blocks: blocks without a lease, with cached KV.
      references: blocks of all leases; a shared block counts once per lease.
      verdict: errors that the ledger found block by block; empty if none.
      spoiled_blocks: free blocks that were written after they were freed (I8); None where freed
        blocks are not poisoned.
    """

    total_blocks: Count
    free_blocks: Count
    leased_blocks: Count
    cached_blocks: Count
    references: Count
    verdict: Text = ""
    spoiled_blocks: Count | None = None


class LeaseAudit(msgspec.Struct, frozen=True):
    """One attempt's right to hold blocks.

    Attributes:
      attempt: request id and attempt number.
      server: name and epoch of the server that asked for it.
      state: state of the lease.
      num_blocks: blocks held.
      age_s: since it was granted.
      renewed_ago_s: since its server last named it.
      remaining_s: until its deadline.
      num_tokens: completion tokens that exist.
      allowed: positions below this may be generated; None on prefill.
    """

    attempt: Id
    server: Id
    state: Id
    num_blocks: Count
    age_s: Seconds
    renewed_ago_s: Seconds
    remaining_s: Seconds
    num_tokens: Count = 0
    allowed: Count | None = None


class WindowsAudit(msgspec.Struct, frozen=True):
    """KV on its way out of a prefill worker; all zero on decode.

    Attributes:
      kv_under_way_bytes: sent and not acknowledged.
      kv_granted_bytes: sum of the windows of all receivers.
      ring_bytes: exported and not taken.
      ring_size_bytes: size of the ring.
      verdict: disagreements between the counters and their contents; empty if none.
    """

    kv_under_way_bytes: Count = 0
    kv_granted_bytes: Count = 0
    ring_bytes: Count = 0
    ring_size_bytes: Count = 0
    verdict: Text = ""


class WorkerAudit(msgspec.Struct, frozen=True):
    """One epoch of one worker, between two of its decisions.

    Attributes:
      role: prefill or decode.
      name: name in the fleet.
      epoch: epoch as shown in logs.
      lease_ttl_s: how long a lease lives without renewal.
      is_draining: accepts no new work.
      pool: blocks.
      leases: oldest first, at most MAX_AUDIT_LEASES.
      num_leases: total number, also if the list was cut.
      verdict: disagreements between leases, attempts and blocks; empty if none.
      leaving: ended attempts that the running step still computes.
      leaving_blocks: blocks that these hold until the step returns.
      granted: leases granted since the process started.
      ended: leases ended since then, by reason.
      late_rows: rows of steps that returned after their attempt had ended.
      tombstones: ended requests that are remembered.
      max_tombstones: their limit.
      rows: sequences in the running step.
      running: leases that may have a row.
      paused: leases that wait for their reader.
      max_num_seqs: most rows of a decode step.
      windows: KV under way.
      steps: device steps.
      computed_tokens: tokens computed in them.
      kv_bytes: sent by prefill, received by decode.
      dropped: frames ignored, by reason.
      bad_digests: damaged chunks.
      preemptions: attempts that lost their blocks to others.
      process: facts from the operating system.
      draft_pool: blocks of the draft model, if there is one.
      prompt_tokens: part of `computed_tokens`: prompt tokens that decode computed.
      late_tokens: tokens computed in `late_rows`, without prompt tokens.
    """

    role: Role
    name: Id
    epoch: Id
    lease_ttl_s: Seconds
    is_draining: bool
    pool: PoolAudit
    leases: Annotated[tuple[LeaseAudit, ...], msgspec.Meta(max_length=MAX_AUDIT_LEASES)]
    num_leases: Count
    granted: Count
    ended: Counts
    verdict: Text = ""
    leaving: Count = 0
    leaving_blocks: Count = 0
    late_rows: Count = 0
    tombstones: Count = 0
    max_tombstones: Count = 0
    rows: Count = 0
    running: Count = 0
    paused: Count = 0
    max_num_seqs: Count = 0
    windows: WindowsAudit = WindowsAudit()
    steps: Count = 0
    computed_tokens: Count = 0
    kv_bytes: Count = 0
    dropped: Counts = msgspec.field(default_factory=dict)
    bad_digests: Count = 0
    preemptions: Count = 0
    process: ProcessFacts = ProcessFacts()
    draft_pool: PoolAudit | None = None
    prompt_tokens: Count = 0
    late_tokens: Count = 0

    @property
    def is_cut(self) -> bool:
        """Return whether there are more leases than are listed."""
        return self.num_leases > len(self.leases)


class AttemptAudit(msgspec.Struct, frozen=True):
    """An attempt as the server counts it on one worker.

    Attributes:
      attempt: request id and attempt number.
      is_asked: the worker was told of it, and heartbeats name it.
      is_granted: decode has leased blocks for it.
      is_wanted: it is the present attempt of a request in flight, on this worker.
    """

    attempt: Id
    is_asked: bool
    is_granted: bool
    is_wanted: bool


class Doubt(msgspec.Struct, frozen=True):
    """A disagreement that may be a race and counts as an error only if it lasts.

    Attributes:
      attempt: the attempt concerned.
      for_s: since the first audit that saw it.
    """

    attempt: Id
    for_s: Seconds


class WorkerView(msgspec.Struct, frozen=True):
    """One worker as the server sees it, with the worker's own account.

    Attributes:
      role: prefill or decode.
      address: address of its control socket.
      name: its name, or its address until it has answered.
      state: connecting, alive, suspect, draining or dead.
      epoch: epoch of the last greeting; empty if there was none.
      silence: why there is no audit; empty if there is one.
      audit: its account.
      before: attempts that the server counted there when it asked.
      after: the same when the answer arrived.
      unknown: leases of this server's present epoch that the server does not know.
      missing: attempts that the server counts there but that have no lease there.
      available_blocks: the server's estimate of free blocks there; the next heartbeat corrects it.
      token_credit: prompt tokens that this server may have under way there; prefill.
      row_credit: sequences that this server may have under way there; decode.
    """

    role: Role
    address: str
    name: str
    state: str
    epoch: str
    silence: str
    audit: WorkerAudit | None
    before: tuple[AttemptAudit, ...] = ()
    after: tuple[AttemptAudit, ...] = ()
    unknown: tuple[Doubt, ...] = ()
    missing: tuple[Doubt, ...] = ()
    available_blocks: int = 0
    token_credit: int = 0
    row_credit: int = 0


class ServerAudit(msgspec.Struct, frozen=True):
    """The server's own account.

    Attributes:
      name: name in the fleet.
      epoch: epoch of this server process.
      received: requests submitted.
      accepted: requests that get a terminal event.
      rejected: requests refused at once, by error code.
      ended: terminal events sent, by outcome.
      in_flight: requests without a terminal event.
      waiting: those of them in the queue.
      running: those of them with an attempt.
      overdue_s: time since the deadline of the most overdue request; negative if none is overdue.
      connections: number of client connections.
      is_draining: accepts no new work.
      process: facts from the operating system.
    """

    name: str
    epoch: str
    received: Count
    accepted: Count
    rejected: dict[str, Count]
    ended: dict[str, Count]
    in_flight: Count
    waiting: Count
    running: Count
    overdue_s: float = -MAX_SECONDS
    connections: Count = 0
    is_draining: bool = False
    process: ProcessFacts = ProcessFacts()


class FleetAudit(msgspec.Struct, frozen=True):
    """A server and all its workers, as close to one moment as possible.

    Attributes:
      grace_s: lifetime of a lease; doubts that last no longer are not violations.
      server: its account, taken last.
      workers: workers in the order of the configuration.
      siblings: accounts of the other servers on its port, with their view of the same workers.
    """

    grace_s: float
    server: ServerAudit
    workers: tuple[WorkerView, ...]
    siblings: tuple[FleetAudit, ...] = ()

    @property
    def answered(self) -> tuple[WorkerAudit, ...]:
        """The accounts of the workers that answered."""
        return tuple(view.audit for view in self.workers if view.audit is not None)

    def to_json(self) -> bytes:
        """Return a JSON document for `from_json`."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, document: bytes | str) -> FleetAudit:
        """Parse a document; unknown fields are ignored.

        Raises:
          ValueError: it is not an audit.
        """
        return msgspec.json.decode(document, type=cls)


def whole_audit(name: str, audits: Sequence[FleetAudit]) -> FleetAudit:
    """Merge the audits of a server that serves several models, each with its own workers.

    Args:
      name: name of the server.
      audits: audits of each model's queue and workers.
    """
    servers = [audit.server for audit in audits]
    rejected: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    for server in servers:
        rejected.update(server.rejected)
        ended.update(server.ended)
    whole = msgspec.structs.replace(
        servers[0],
        name=name,
        received=sum(server.received for server in servers),
        accepted=sum(server.accepted for server in servers),
        rejected=dict(rejected),
        ended=dict(ended),
        in_flight=sum(server.in_flight for server in servers),
        waiting=sum(server.waiting for server in servers),
        running=sum(server.running for server in servers),
        overdue_s=max(server.overdue_s for server in servers),
        connections=sum(server.connections for server in servers),
        is_draining=any(server.is_draining for server in servers),
    )
    workers = tuple(view for audit in audits for view in audit.workers)
    return FleetAudit(max(audit.grace_s for audit in audits), whole, workers)
