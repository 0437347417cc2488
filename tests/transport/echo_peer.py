"""An echo process for tests of links: it sends back every message that it receives.

Run as `python -m tests.transport.echo_peer bind|connect ADDRESS`; its first line on stdout says
that it is ready (and its address, if bound).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from transport.frames import Drain, KvChunk
from transport.handshake import make_hello
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig
from triolet.ids import PeerId, Role, new_epoch
from triolet.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transport.link import LinkMessage

ROOT = Path(__file__).parents[2]
LIFETIME_S = 120.0
"""The process exits by itself after this, whatever happens to the test."""


class EchoPeer:
    """An echo process, as seen from the test that started it."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transport.echo_peer", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    @property
    def state(self) -> str:
        """The kernel's letter for the process state; T is stopped."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
        return stat.rpartition(")")[2].split()[0]

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def echo_peer(*arguments: str) -> Iterator[EchoPeer]:
    """Start an echo process and end it afterwards."""
    peer = EchoPeer(*arguments)
    try:
        yield peer
    finally:
        peer.kill()
        assert peer.process.stdout is not None
        peer.process.stdout.close()


async def _bind(address: str, keys: str | None = None) -> None:
    listener = ZmqNetwork(LinkConfig(), keys).listen(address, hwm=1000, max_frame_bytes=64 * MIB)
    print(listener.address, flush=True)  # noqa: T201
    while True:
        for message in await listener.receive_many():
            listener.send_nowait(message.sender, _echoed(message), _copied(message))


async def _connect(address: str) -> None:
    me = PeerId(Role.SERVER, f"echo-{os.getpid()}", new_epoch())
    network = ZmqNetwork(LinkConfig())
    connection = network.connect(address, me.identity(), hwm=4, max_frame_bytes=64 * MIB)
    await connection.send(make_hello(me))
    print(me.identity().decode(), flush=True)  # noqa: T201
    while True:
        for message in await connection.receive_many():
            await connection.send(_echoed(message), _copied(message))


def _echoed(message: LinkMessage) -> Drain | KvChunk:
    assert isinstance(message.frame, Drain | KvChunk)
    return message.frame


def _copied(message: LinkMessage) -> bytes | None:
    return None if message.payload is None else bytes(message.payload)


async def _main() -> None:
    act = {"bind": _bind, "connect": _connect}[sys.argv[1]]
    with trio.move_on_after(LIFETIME_S):
        await act(*sys.argv[2:])


if __name__ == "__main__":
    trio.run(_main)
