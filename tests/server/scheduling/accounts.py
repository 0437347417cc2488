"""Audit accounts of fake workers for tests, in the form that real workers send."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triolet.audit import LeaseAudit, PoolAudit, WorkerAudit
from triolet.ids import shown_epoch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triolet.ids import AttemptKey

    from .fakes import FakeDecode, FakePrefill

LEASE_TTL_S = 2.0


def decode_account(fake: FakeDecode) -> WorkerAudit:
    """Return the account of a fake decode worker."""
    blocks = {key: row.num_blocks for key, row in fake.rows.items()}
    allowed = {key: (row.position, row.allowed) for key, row in fake.rows.items()}
    return _account(fake, blocks, allowed)


def prefill_account(fake: FakePrefill) -> WorkerAudit:
    """Return the account of a fake prefill worker. Its prompts take no blocks."""
    return _account(fake, dict.fromkeys(fake.waiting, 0), {})


def _account(
    fake: FakeDecode | FakePrefill,
    blocks: Mapping[AttemptKey, int],
    allowed: Mapping[AttemptKey, tuple[int, int]],
) -> WorkerAudit:
    leased_blocks = sum(blocks.values())
    leases = [
        LeaseAudit(
            attempt=str(key),
            server=fake.server,
            state="running",
            num_blocks=num_blocks,
            age_s=0.0,
            renewed_ago_s=0.0,
            remaining_s=1.0,
            num_tokens=allowed[key][0] if key in allowed else 0,
            allowed=allowed[key][1] if key in allowed else None,
        )
        for key, num_blocks in blocks.items()
    ]
    return WorkerAudit(
        role=fake.role,
        name=fake.name,
        epoch=shown_epoch(fake.epoch),
        lease_ttl_s=LEASE_TTL_S,
        is_draining=fake.is_draining,
        pool=PoolAudit(
            total_blocks=fake.num_blocks,
            free_blocks=fake.num_blocks - leased_blocks,
            leased_blocks=leased_blocks,
            cached_blocks=0,
            references=leased_blocks,
        ),
        leases=tuple(leases),
        num_leases=len(leases),
        granted=len(leases),
        ended={},
        steps=fake.steps,
    )
