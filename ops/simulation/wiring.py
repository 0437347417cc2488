"""The shared network as one life of one process has it: when that life ends without a word, its
links are cut before any of its code can say another one.

Knows links; knows no processes. See transport.link.Network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transport.memory_network import MemoryConnection, MemoryListener, MemoryNetwork


class Wiring:
    """Makes links and remembers them.

    Args:
      network: makes them really.
    """

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._listeners: list[MemoryListener] = []
        self._connections: list[MemoryConnection] = []

    def listen(self, address: str, *, hwm: int, max_frame_bytes: int) -> MemoryListener:
        """Bind."""
        listener = self._network.listen(address, hwm=hwm, max_frame_bytes=max_frame_bytes)
        self._listeners.append(listener)
        return listener

    def connect(
        self, address: str, identity: bytes, *, hwm: int, max_frame_bytes: int
    ) -> MemoryConnection:
        """Connect."""
        connection = self._network.connect(
            address, identity, hwm=hwm, max_frame_bytes=max_frame_bytes
        )
        self._connections.append(connection)
        return connection

    def sever(self) -> None:
        """Let nothing more get out: whatever is sent from now on finds no peer."""
        for connection in self._connections:
            connection.detach()
        for listener in self._listeners:
            for identity in tuple(listener.inbox.pipes):
                listener.detach(identity)

    def close(self) -> None:
        """Close every link."""
        for listener in self._listeners:
            listener.close()
        for connection in self._connections:
            connection.close()
