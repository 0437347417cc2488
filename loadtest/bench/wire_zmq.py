"""What ZeroMQ alone moves over loopback: `python -m loadtest.bench.wire_zmq`.

Two sockets of the kinds that workers use, one I/O thread each, a window in messages; no Trio, no
leases, no frames with form. Asked for `work`, both ends also touch each byte as often as the KV
path does: copied into a ring and digested, digested and copied out. What is left between that and
the KV path is Triolet's own. Lines of JSON on stdin say how much.
"""

from __future__ import annotations

import argparse
import json
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash
import zmq

from transport.zmq_memory import keep_received_memory
from triolet.units import MIB

from .wire_raw import SOURCE_BYTES, cpu_s, frames, say

if TYPE_CHECKING:
    import numpy.typing as npt

RING_BYTES: Final = 64 * MIB
WINDOW: Final = 8
ADDRESS: Final = "tcp://127.0.0.1:*"
_HEAD: Final = bytes(64)


class Sender:
    """Sends frames out of its memory, or out of a ring into which it copies them first."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._memory = touched(SOURCE_BYTES)
        self._ring = touched(RING_BYTES)
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, b"sender")
        self._socket.connect(address)

    def move(self, num_bytes: int, size: int, *, works: bool) -> None:
        """Send everything and wait until all is received."""
        slots = RING_BYTES // size
        num_sent = num_heard = 0
        for begin in frames(num_bytes, size):
            if num_sent - num_heard == WINDOW:
                self._socket.recv()
                num_heard += 1
            place = self._memory[begin : begin + size]
            if works:
                slot = num_sent % slots * size
                self._ring[slot : slot + size] = place
                place = self._ring[slot : slot + size]
                xxhash.xxh3_128_digest(place.data)
            self._socket.send(_HEAD, zmq.SNDMORE)
            self._socket.send(place.data, copy=False)
            num_sent += 1
        for _ in range(num_sent - num_heard):
            self._socket.recv()


class Receiver:
    """Receives frames, each copied to its place."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._memory = touched(SOURCE_BYTES)
        self._socket = context.socket(zmq.ROUTER)
        self._socket.bind(ADDRESS)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def move(self, num_bytes: int, size: int, *, works: bool) -> None:
        """Receive everything, answering each frame."""
        for begin in frames(num_bytes, size):
            sender, _ = self._socket.recv(), self._socket.recv()
            payload = self._socket.recv(copy=False).buffer
            if works:
                xxhash.xxh3_128_digest(payload)
            self._memory[begin : begin + size] = np.frombuffer(payload, dtype=np.uint8)
            self._socket.send_multipart([sender, _HEAD])


def touched(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return memory every page of which is there."""
    return np.resize(np.arange(1, 256, dtype=np.uint8), num_bytes)


def main() -> None:
    """Be one end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("send", "receive"))
    parser.add_argument("address", nargs="?", default="")
    arguments = parser.parse_args()
    with zmq.Context(io_threads=1) as context:
        end: Sender | Receiver
        if arguments.role == "receive":
            keep_received_memory(RING_BYTES)
            end = Receiver(context)
            say({"address": end.address})
        else:
            end = Sender(context, arguments.address)
            say({})
        for line in sys.stdin:
            request: dict[str, Any] = json.loads(line)
            began_at, began_cpu_s = perf_counter(), cpu_s()
            end.move(request["bytes"], request["frame"], works=request["work"])
            say({"seconds": perf_counter() - began_at, "cpu_s": cpu_s() - began_cpu_s})
        context.destroy(linger=0)


if __name__ == "__main__":
    main()
