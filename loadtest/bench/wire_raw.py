"""What two processes move over a bare loopback socket: `python -m loadtest.bench.wire_raw`.

One thread each, blocking calls, frames without form: the most that this machine's sockets do for
Python. Lines of JSON on stdin say how much; only the standard library is used.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, Final

SOURCE_BYTES: Final = 256 * 2**20
"""Sent from, and received into, as much memory as a pool has: far more than the caches hold."""


def cpu_s() -> float:
    """Return what the process and the kernel on its behalf have computed so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def listen(kind: str, address: str) -> tuple[socket.socket, str]:
    """Bind; return the listener and where it is."""
    if kind == "ipc":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        address = str(listener.getsockname()[1])
    listener.listen(1)
    return listener, address


def connect(kind: str, address: str) -> socket.socket:
    """Connect to a listener."""
    if kind == "ipc":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
    else:
        connection = socket.create_connection(("127.0.0.1", int(address)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def frames(num_bytes: int, frame_bytes: int) -> list[int]:
    """Return where each frame begins in the memory, round and round."""
    places = SOURCE_BYTES // frame_bytes
    return [index % places * frame_bytes for index in range(num_bytes // frame_bytes)]


def send(connection: socket.socket, memory: memoryview, request: dict[str, Any]) -> None:
    """Send frames and wait until all are received."""
    size = request["frame"]
    for begin in frames(request["bytes"], size):
        connection.sendall(memory[begin : begin + size])
    assert connection.recv(1) == b"\1", "the receiver has gone"


def receive(connection: socket.socket, memory: memoryview, request: dict[str, Any]) -> None:
    """Receive frames, all into one buffer or each to its place."""
    size = request["frame"]
    for begin in frames(request["bytes"], size):
        place = begin if request["spread"] else 0
        rest = memory[place : place + size]
        while rest:
            rest = rest[connection.recv_into(rest) :]
    connection.sendall(b"\1")


def main() -> None:
    """Be one end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("send", "receive"))
    parser.add_argument("kind", choices=("tcp", "ipc"))
    parser.add_argument("address")
    arguments = parser.parse_args()
    memory = memoryview(bytearray(bytes(range(1, 256)) * (SOURCE_BYTES // 255 + 1)))
    if arguments.role == "receive":
        listener, address = listen(arguments.kind, arguments.address)
        say({"address": address})
        connection, _ = listener.accept()
        if arguments.kind == "ipc":
            Path(address).unlink()
    else:
        connection = connect(arguments.kind, arguments.address)
        say({})
    move = receive if arguments.role == "receive" else send
    for line in sys.stdin:
        began_at, began_cpu_s = perf_counter(), cpu_s()
        move(connection, memory, json.loads(line))
        say({"seconds": perf_counter() - began_at, "cpu_s": cpu_s() - began_cpu_s})


def say(message: dict[str, Any]) -> None:
    """Write one answer."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
