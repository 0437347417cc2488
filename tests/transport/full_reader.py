"""A process that listens and does not read, while one that floods it is killed.

Run as `python -m tests.transport.full_reader ADDRESS`. Says `lives` after longer than any timer of
ZeroMQ's would need; without the cure libzmq aborts it.
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
"""Tries in a row, 10 ms apart, that find no room."""
STANDSTILL_S = 2.0
"""Six times the interval at which heartbeats were sent."""


async def _main(address: str) -> None:
    listener = ZmqNetwork(LinkConfig()).listen(address, hwm=HWM, max_frame_bytes=MIB)
    with echo_peer("connect", listener.address) as peer:
        [message] = await listener.receive_many()
        # It sends each of them back, until pipes that are not read are full both ways.
        num_busy, index = 0, 0
        while num_busy < FULL:
            index += 1
            try:
                listener.send_nowait(message.sender, chunk(index), bytes(64 * KIB))
                num_busy = 0
            except PeerBusy:
                num_busy += 1
                await trio.sleep(0.01)
        await trio.sleep(0.5)
        peer.kill()
    await trio.sleep(STANDSTILL_S)
    print("lives", flush=True)  # noqa: T201 (what the test waits for)


if __name__ == "__main__":
    trio.run(_main, sys.argv[1])
