"""What a process says of itself when it is audited, and what a server gathers of its fleet.

Plain frozen data whose form on the wire (maps by field name, in the AUDITED frame) is also its form
as JSON. Knows what is counted; whether it adds up is judged in invariants.py. The log of what
administrators do is another thing: ops/audit.

Every field serves a check or tells an operator where to look. Ids are text, as logs show them;
times are durations, so that no clock is compared with another process's.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec

from .ids import Role  # noqa: TC001 (msgspec reads the annotations)

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_SECONDS = 1e9
"""Thirty years: keeps infinity and NaN out."""
MAX_WORDS = 64
"""Kinds of ends, of drops, of error codes: there are few, and they are known."""
MAX_AUDIT_LEASES = 4096
"""Leases that a worker lists when it is audited, the oldest first: a megabyte, and a leaked one is
always among them. It says how many there are in all."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]
Id: TypeAlias = Annotated[str, msgspec.Meta(max_length=128)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)]
Counts: TypeAlias = Annotated[dict[Id, Count], msgspec.Meta(max_length=MAX_WORDS)]


class ProcessFacts(msgspec.Struct, frozen=True):
    """What the operating system and Trio say of a process; None where they do not say.

    Attributes:
      pid: process id.
      open_fds: open files, sockets among them.
      threads: of the whole process.
      tasks: Trio tasks alive.
      rss_bytes: memory that it occupies.
    """

    pid: Count | None = None
    open_fds: Count | None = None
    threads: Count | None = None
    tasks: Count | None = None
    rss_bytes: Count | None = None


class PoolAudit(msgspec.Struct, frozen=True):
    """The blocks of one worker (I1).

    Attributes:
      total_blocks: that can be leased.
      free_blocks: hold nothing.
      leased_blocks: some lease names them.
      cached_blocks: no lease names them, but their KV is kept.
      references: blocks of all leases, a shared one counted once for each.
      verdict: what the ledger found wrong block by block; empty if nothing.
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
      server: name and epoch of the life that asked for it.
      state: of the lease.
      num_blocks: that it holds.
      age_s: since it was granted.
      renewed_ago_s: since its server last named it.
      remaining_s: until its deadline.
      num_tokens: completion tokens that exist.
      allowed: positions below this may be produced; None on prefill.
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
      kv_under_way_bytes: sent and not answered.
      kv_granted_bytes: what all receivers together let be under way.
      ring_bytes: exported and not taken.
      ring_size_bytes: the most that may be.
      verdict: what the counts and their contents disagree on; empty if nothing.
    """

    kv_under_way_bytes: Count = 0
    kv_granted_bytes: Count = 0
    ring_bytes: Count = 0
    ring_size_bytes: Count = 0
    verdict: Text = ""


class WorkerAudit(msgspec.Struct, frozen=True):
    """One life of one worker, between two of its decisions.

    Attributes:
      role: prefill or decode.
      name: in the fleet.
      epoch: of this life, as logs show it.
      lease_ttl_s: how long a lease lives without being named.
      is_draining: nothing new is taken.
      pool: blocks.
      leases: the oldest first, at most MAX_AUDIT_LEASES of them.
      num_leases: how many there are; more than are listed if the list was cut.
      verdict: what leases, attempts and blocks disagree on; empty if nothing.
      leaving: attempts that ended while the running step computes them.
      leaving_blocks: what these hold until it returns.
      granted: leases granted since the process began.
      ended: leases that ended since then, by reason.
      late_rows: attempts' parts of steps that returned after the attempt had ended.
      tombstones: ended requests that are remembered.
      max_tombstones: the most that are.
      rows: sequences in the running step.
      running: leases that may have a row.
      paused: leases that wait for their reader.
      max_num_seqs: rows that a decode step has at most.
      windows: KV under way.
      steps: device steps.
      computed_tokens: tokens that they computed.
      kv_bytes: sent by prefill, received by decode.
      dropped: frames that were not acted upon, by reason.
      bad_digests: chunks that came damaged.
      preemptions: attempts that lost their blocks to others.
      process: of the operating system.
      draft_pool: blocks of the draft model, if there is one.
      prompt_tokens: those of `computed_tokens` that decode computed of prompts.
      late_tokens: what `late_rows` had computed, prompts' tokens not counted.
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
        """Whether there are more leases than are listed."""
        return self.num_leases > len(self.leases)


class AttemptAudit(msgspec.Struct, frozen=True):
    """An attempt as the server counts it on one worker.

    Attributes:
      attempt: request id and attempt number.
      is_asked: the worker was told of it; it is named in heartbeats.
      is_granted: decode has leased blocks for it.
      is_wanted: a request in flight has it as its present attempt, on this worker.
    """

    attempt: Id
    is_asked: bool
    is_granted: bool
    is_wanted: bool


class Doubt(msgspec.Struct, frozen=True):
    """Something that may be a race, and is none if it lasts.

    Attributes:
      attempt: which.
      for_s: since the first audit that saw it so.
    """

    attempt: Id
    for_s: Seconds


class WorkerView(msgspec.Struct, frozen=True):
    """One worker as the server sees it, with the worker's own words.

    Attributes:
      role: prefill or decode.
      address: where it is reached.
      name: its own, or its address while it has not answered.
      state: connecting, alive, suspect, draining or dead.
      epoch: of the life that was greeted; empty if none was.
      silence: why there is no audit; empty if there is one.
      audit: what it said.
      before: attempts that the server counted there when it asked.
      after: the same when the answer came.
      unknown: leases that this server's present life should have and does not know.
      missing: attempts that the server counts there and the worker has no lease for.
      available_blocks: what the server believes to be free there; the next heartbeat corrects it.
      token_credit: prompt tokens that the worker lets this server have under way; prefill.
      row_credit: sequences that it lets it have under way; decode.
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
    """The server's own accounts.

    Attributes:
      name: in the fleet.
      epoch: of this life.
      received: requests submitted.
      accepted: of these, will get a terminal event.
      rejected: of these, were refused at once; by error code.
      ended: terminal events given out; by outcome.
      in_flight: requests without a terminal event.
      waiting: of these, those in the line.
      running: of these, those with an attempt.
      overdue_s: by how much the most overdue request has outlived its deadline; negative if none.
      connections: of clients.
      is_draining: nothing new is taken.
      process: of the operating system.
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
    """A server and all its workers, as near to one moment as can be had.

    Attributes:
      grace_s: what is in doubt for no longer is no violation: the life of a lease.
      server: its accounts, taken last.
      workers: in the order of the configuration.
      siblings: what the other servers on its port say of themselves and of the same workers.
    """

    grace_s: float
    server: ServerAudit
    workers: tuple[WorkerView, ...]
    siblings: tuple[FleetAudit, ...] = ()

    @property
    def answered(self) -> tuple[WorkerAudit, ...]:
        """What the workers said that answered."""
        return tuple(view.audit for view in self.workers if view.audit is not None)

    def to_json(self) -> bytes:
        """Return the document that `from_json` reads."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, document: bytes | str) -> FleetAudit:
        """Return the audit in a document; fields that it does not know are ignored.

        Raises:
          ValueError: it is none.
        """
        return msgspec.json.decode(document, type=cls)


def whole_audit(name: str, audits: Sequence[FleetAudit]) -> FleetAudit:
    """Return one audit of a server that serves several models, each with workers of its own.

    Args:
      name: of the server.
      audits: of each model's queue and workers.
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
