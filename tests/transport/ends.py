"""Test helper that connects two ends of a network over memory, ipc or tcp."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import trio
import zmq

from transport.frames import Drain, KvChunk
from transport.handshake import make_hello
from transport.link import PeerBusy, PeerGone
from transport.memory_network import MemoryConnection, MemoryNetwork
from transport.zmq_curve import KeyDirectory, make_keys
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig
from triolet.ids import PeerId, Role
from triolet.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transport.link import Connection, LinkMessage, Listener, Network

KINDS = ("memory", "ipc", "tcp")
SERVER = PeerId(Role.SERVER, "web-0", 1)
ME = SERVER.identity()
POLL_S = 0.002
PATIENCE_S = 60.0
"""Nothing here takes a second on an idle machine, but the machine may be busy."""


class Enemy(Protocol):
    """Connects under a name and sends arbitrary parts."""

    def send(self, *parts: bytes) -> None: ...

    def has_received(self) -> bool: ...


class Ends:
    """A bound and a connecting network that reach each other.

    Attributes:
      address: of the bound side, once it listens.
      keys: key directory that both share; None without keys.
    """

    def __init__(
        self, bound: Network, connecting: Network, address: str, keys: str | None = None
    ) -> None:
        self.keys = keys
        self.bound = bound
        self.connecting = connecting
        self.address = address

    def listen(self, hwm: int = 1000, max_frame_bytes: int = 64 * MIB) -> Listener:
        listener = self.bound.listen(self.address, hwm=hwm, max_frame_bytes=max_frame_bytes)
        self.address = listener.address
        return listener

    def connect(self, identity: bytes = ME, hwm: int = 1000) -> Connection:
        return self.connecting.connect(self.address, identity, hwm=hwm, max_frame_bytes=64 * MIB)

    async def linked(self, hwm: int = 1000) -> tuple[Listener, Connection]:
        """Return both sides of a link after HELLO and a frame back."""
        listener, connection = self.listen(hwm), self.connect(hwm=hwm)
        with trio.fail_after(PATIENCE_S):
            await connection.send(make_hello(SERVER))
            await listener.receive_many()
            listener.send_nowait(ME, Drain(0.0))
            await connection.receive_many()
        return listener, connection

    @contextmanager
    def enemy(self, identity: bytes) -> Iterator[Enemy]:
        """Return an attacker connected under this name."""
        if isinstance(self.connecting, MemoryNetwork):
            connection = self.connecting.connect(
                self.address, identity, hwm=1000, max_frame_bytes=MIB
            )
            yield _MemoryEnemy(connection)
            connection.close()
        else:
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.set(zmq.IDENTITY, identity)
                socket.set(zmq.LINGER, 0)
                if self.keys is not None:
                    own = KeyDirectory.load(Path(self.keys))
                    socket.set(zmq.CURVE_PUBLICKEY, own.public)
                    socket.set(zmq.CURVE_SECRETKEY, own.secret)
                    socket.set(zmq.CURVE_SERVERKEY, own.public)
                socket.connect(self.address)
                yield _ZmqEnemy(socket)

    def close(self) -> None:
        self.connecting.close()
        self.bound.close()


class _MemoryEnemy:
    def __init__(self, connection: MemoryConnection) -> None:
        self._connection = connection

    def send(self, *parts: bytes) -> None:
        self._connection.send_parts_nowait(parts)

    def has_received(self) -> bool:
        return any(pipe.peek() for pipe in self._connection.inbox.pipes.values())


class _ZmqEnemy:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send(self, *parts: bytes) -> None:
        self._socket.send_multipart(parts)

    def has_received(self) -> bool:
        return bool(self._socket.poll(50))


def open_ends(kind: str, directory: Path) -> Ends:
    """Return two ends of a kind of network; ipc sockets lie in `directory`."""
    if kind == "memory":
        network = MemoryNetwork()
        return Ends(network, network, "memory://worker")
    directory.chmod(0o700)
    if kind == "ipc":
        return Ends(ZmqNetwork(LinkConfig()), ZmqNetwork(LinkConfig()), f"ipc://{directory}/worker")
    keys = make_key_directory(directory)
    networks = ZmqNetwork(LinkConfig(), keys), ZmqNetwork(LinkConfig(), keys)
    return Ends(*networks, "tcp://127.0.0.1:*", keys)


def make_key_directory(directory: Path) -> str:
    """Return a key directory shared by a fleet."""
    make_keys(directory / "keys")
    return str(directory / "keys")


def chunk(index: int) -> KvChunk:
    return KvChunk(b"r" * 16, 0, 1, index, 0, 1, b"d" * 16)


async def until(condition: Callable[[], bool], poll_s: float = POLL_S) -> None:
    """Wait until a condition on real sockets holds."""
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 (what sockets do sets no event)
            await trio.sleep(poll_s)


def is_gone(send: Callable[[], None]) -> bool:
    """Return whether sending fails because there is no peer."""
    try:
        send()
    except PeerGone:
        return True
    except PeerBusy:
        return False
    return False


async def receive_numbers(
    end: Listener | Connection, count: int, into: list[float], max_messages: int = 256
) -> None:
    """Receive until `into` has `count` numbers of Drain frames."""
    while len(into) < count:
        into.extend(number_of(m) for m in await end.receive_many(max_messages))


def number_of(message: LinkMessage) -> float:
    assert isinstance(message.frame, Drain)
    return message.frame.deadline_s
