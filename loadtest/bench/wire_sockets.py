"""`python -m loadtest.bench.wire_sockets`: one end of a bare socket or ZeroMQ transfer.

The KV path benchmark (wire.py) starts two of these as its baselines. Bare sockets use one thread
each, blocking calls and raw frames: the maximum throughput from Python. ZeroMQ uses the same socket
types as workers with one I/O thread each and a window in messages, but no Trio, leases or protocol.
With `work`, both ends also touch each byte as often as the KV path does: copied into a ring and
digested, digested and copied out. The remaining difference to the KV path is Triolet's own
overhead. Commands are lines of JSON.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash
import zmq

from transport.zmq_memory import keep_received_memory
from triolet.units import MIB

from ..harness.lines import cpu_s, say

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Move = Callable[[dict[str, Any]], None]

SOURCE_BYTES: Final = 256 * MIB
"""Memory to send from and receive into: as large as a pool, far larger than the CPU caches."""
RING_BYTES: Final = 64 * MIB
WINDOW: Final = 8
ZMQ: Final = "zmq"
ADDRESS: Final = "tcp://127.0.0.1:*"
_HEAD: Final = bytes(64)


def frames(num_bytes: int, frame_bytes: int) -> list[int]:
    """Return the offset of each frame in the memory, in a cycle."""
    places = SOURCE_BYTES // frame_bytes
    return [index % places * frame_bytes for index in range(num_bytes // frame_bytes)]


def touched(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return memory with all pages allocated."""
    return np.resize(np.arange(1, 256, dtype=np.uint8), num_bytes)


def raw_sender(kind: str, address: str) -> Move:
    """Connect. Return a function that sends frames and waits until all are received."""
    connection = socket.socket(socket.AF_UNIX if kind == "ipc" else socket.AF_INET)
    connection.connect(address if kind == "ipc" else ("127.0.0.1", int(address)))
    if kind != "ipc":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(touched(SOURCE_BYTES).data)
    say({})

    def send(request: dict[str, Any]) -> None:
        size = request["frame"]
        for begin in frames(request["bytes"], size):
            connection.sendall(memory[begin : begin + size])
        assert connection.recv(1) == b"\1", "the receiver has exited"

    return send


def raw_receiver(kind: str, address: str) -> Move:
    """Listen. Return a function that receives frames, into one buffer or each at its offset."""
    listener = socket.socket(socket.AF_UNIX if kind == "ipc" else socket.AF_INET)
    listener.bind(address if kind == "ipc" else ("127.0.0.1", 0))
    listener.listen(1)
    memory = memoryview(touched(SOURCE_BYTES).data)
    say({"address": address if kind == "ipc" else str(listener.getsockname()[1])})
    connection, _ = listener.accept()
    if kind == "ipc":
        Path(address).unlink()

    def receive(request: dict[str, Any]) -> None:
        size = request["frame"]
        for begin in frames(request["bytes"], size):
            place = begin if request["spread"] else 0
            rest = memory[place : place + size]
            while rest:
                rest = rest[connection.recv_into(rest) :]
        connection.sendall(b"\1")

    return receive


def zmq_sender(context: zmq.Context[zmq.Socket[bytes]], address: str) -> Move:
    """Connect. Return a function that sends frames from memory, or copies them to a ring first."""
    memory, ring = touched(SOURCE_BYTES), touched(RING_BYTES)
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.IDENTITY, b"sender")
    dealer.connect(address)
    say({})

    def send(request: dict[str, Any]) -> None:
        size = request["frame"]
        slots = RING_BYTES // size
        num_sent = num_heard = 0
        for begin in frames(request["bytes"], size):
            if num_sent - num_heard == WINDOW:
                dealer.recv()
                num_heard += 1
            place = memory[begin : begin + size]
            if request["work"]:
                slot = num_sent % slots * size
                ring[slot : slot + size] = place
                place = ring[slot : slot + size]
                xxhash.xxh3_128_digest(place.data)
            dealer.send(_HEAD, zmq.SNDMORE)
            dealer.send(place.data, copy=False)
            num_sent += 1
        for _ in range(num_sent - num_heard):
            dealer.recv()

    return send


def zmq_receiver(context: zmq.Context[zmq.Socket[bytes]]) -> Move:
    """Listen. Return a function that receives frames, copies each to its offset and confirms it."""
    keep_received_memory(RING_BYTES)
    memory = touched(SOURCE_BYTES)
    router = context.socket(zmq.ROUTER)
    router.bind(ADDRESS)
    say({"address": router.getsockopt_string(zmq.LAST_ENDPOINT)})

    def receive(request: dict[str, Any]) -> None:
        size = request["frame"]
        for begin in frames(request["bytes"], size):
            sender, _ = router.recv(), router.recv()
            payload = router.recv(copy=False).buffer
            if request["work"]:
                xxhash.xxh3_128_digest(payload)
            memory[begin : begin + size] = np.frombuffer(payload, dtype=np.uint8)
            router.send_multipart([sender, _HEAD])

    return receive


def main() -> None:
    """Run one end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("send", "receive"))
    parser.add_argument("kind", choices=("tcp", "ipc", ZMQ))
    parser.add_argument("address", nargs="?", default="")
    arguments = parser.parse_args()
    sends, kind, address = arguments.role == "send", arguments.kind, arguments.address
    with zmq.Context(io_threads=1) as context:
        if kind == ZMQ:
            move = zmq_sender(context, address) if sends else zmq_receiver(context)
        else:
            move = (raw_sender if sends else raw_receiver)(kind, address)
        for line in sys.stdin:
            began_at, began_cpu_s = perf_counter(), cpu_s()
            move(json.loads(line))
            say({"seconds": perf_counter() - began_at, "cpu_s": cpu_s() - began_cpu_s})
        context.destroy(linger=0)


if __name__ == "__main__":
    main()
