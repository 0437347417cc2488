"""Test helper that audits workers, with a server that has no requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from transport.frames import Audit, Audited, Goodbye, Welcome
from transport.handshake import make_hello
from transport.link import PeerGone
from triolet.audit import FleetAudit, ServerAudit, WorkerView
from triolet.ids import PeerId, Role

if TYPE_CHECKING:
    from transport.link import Network
    from triolet.audit import WorkerAudit

GRACE_S = 2.0
CONNECT_S = 30.0
ANSWER_S = 30.0
OPERATOR = PeerId(Role.OPERATOR, "auditor", 99)
NOBODY = ServerAudit("nobody", "", 0, 0, {}, {}, 0, 0, 0)


def fleet_of(*accounts: WorkerAudit) -> FleetAudit:
    """Return workers' accounts as the audit of a server without requests."""
    views = tuple(
        WorkerView(
            role=account.role,
            address="",
            name=account.name,
            state="alive",
            epoch=account.epoch,
            silence="",
            audit=account,
            available_blocks=account.pool.free_blocks + account.pool.cached_blocks,
        )
        for account in accounts
    )
    return FleetAudit(GRACE_S, NOBODY, views)


async def ask(network: Network, address: str, me: PeerId = OPERATOR) -> WorkerAudit | None:
    """Ask a worker for its account over its control listener; None if it leaves or has left."""
    connection = network.connect(address, me.identity(), hwm=100, max_frame_bytes=2**24)
    try:
        with trio.move_on_after(CONNECT_S) as connecting:
            await connection.send(make_hello(me))
        if connecting.cancelled_caught:
            return None
        with trio.fail_after(ANSWER_S):
            await connection.send(Audit(7))
            while True:
                for message in await connection.receive_many():
                    match message.frame:
                        case Audited(serial=serial, account=account):
                            assert serial == 7
                            return account
                        case Goodbye():
                            return None
                        case frame:
                            assert isinstance(frame, Welcome), frame
    except PeerGone:
        return None
    finally:
        connection.close()
