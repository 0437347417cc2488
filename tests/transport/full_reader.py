"""A process for tests of links: it listens but does not read, while a process that floods it is
killed.

Run as `python -m tests.transport.full_reader ADDRESS`. It prints `lives` after longer than any of
ZeroMQ's timers would need; without the fix libzmq aborts it.
"""

from __future__ import annotations

import sys

import trio

from transport.link import PeerBusy
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig
from triolet.units import KIB, MIB

from .echo_peer import echo_peer
from .ends import chunk

HWM = 4
FULL = 20
"""Failed sends in a row, 10 ms apart, that mean there is no room."""
MOST = 400
"""Messages, 25 MiB; bounded pipes take a few dozen."""
STANDSTILL_S = 2.0
"""Six times the former heartbeat interval."""


async def _main(address: str) -> None:
    listener = ZmqNetwork(LinkConfig()).listen(address, hwm=HWM, max_frame_bytes=MIB)
    with echo_peer("connect", listener.address) as peer:
        [message] = await listener.receive_many()
        # The peer sends each of them back, until unread pipes are full in both directions.
        num_busy = num_sent = 0
        while num_busy < FULL:
            assert num_sent < MOST, "the pipes never fill up"
            try:
                listener.send_nowait(message.sender, chunk(num_sent), bytes(64 * KIB))
                num_sent, num_busy = num_sent + 1, 0
            except PeerBusy:
                num_busy += 1
                await trio.sleep(0.01)
        await trio.sleep(0.5)
        peer.kill()
    await trio.sleep(STANDSTILL_S)
    print("lives", flush=True)  # noqa: T201 (what the test waits for)


if __name__ == "__main__":
    trio.run(_main, sys.argv[1])
