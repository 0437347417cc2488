"""What is left in a fleet that has nothing to do: held blocks, and what its audit objects to."""

from __future__ import annotations

import json

import trio

from ..cancel_report import KvBlocks, blocks_of
from .exchange import get

SETTLE_S = 30.0
"""After the last answer: leases of the dead run out after 2 s and a heartbeat tells of it, if the
machine lets them."""
POLL_S = 0.1


async def blocks_when_settled(url: str) -> KvBlocks:
    """Return the blocks by state once none is leased, or as they are when time is up."""
    give_up = trio.current_time() + SETTLE_S
    while True:
        _, body = await get(url, "/metrics")
        blocks = blocks_of(body.decode())
        if blocks.is_all_free or trio.current_time() > give_up:
            return blocks
        await trio.sleep(POLL_S)


async def violations_now(url: str) -> list[str]:
    """Return what the fleet's audit objects to."""
    status, body = await get(url, "/fleet/audit")
    if status != 200:
        return [f"the audit answered {status}"]
    return [json.dumps(violation) for violation in json.loads(body)["violations"]]
