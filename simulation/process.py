"""A simulated process that can crash, freeze and restart, and its links.

At a crash its links are cut before its code can send more frames.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import trio

from .deterministic import ProcessGate, behind

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from transport.memory_network import MemoryConnection, MemoryListener, MemoryNetwork
    from triolet.config import LinkConfig
    from triolet.ids import Role

    from .faults import Tally


class Wiring:
    """Creates the links of a process and can cut them.

    Args:
      network: network that creates the links.
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
        """Cut all links: later frames reach no peer."""
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


class Surroundings(Protocol):
    """State shared by all processes of a run."""

    @property
    def network(self) -> MemoryNetwork:
        """The network between them."""
        ...

    @property
    def link(self) -> LinkConfig:
        """Deadlines and bounds of links."""
        ...

    @property
    def rng(self) -> random.Random:
        """Random source of epochs."""
        ...

    @property
    def tally(self) -> Tally:
        """Counts of events."""
        ...

    def zones_of(self, request_id: bytes) -> frozenset[str]:
        """Return the zones that a request is bound to; empty for any."""
        ...

    def report(self, what: str) -> None:
        """Record a violation."""
        ...

    def note(self, what: str) -> None:
        """Record an event."""
        ...


class Process(ABC):
    """A process of the fleet, through all its restarts.

    Args:
      role: role of the process.
      name: its name in the fleet.
      around: state shared by all processes.

    Attributes:
      lives: number of starts.
      restart_s: time between its exit and the next start.
      away_until: end of its last freeze.
      stopped_s: duration of its last freeze.
    """

    def __init__(self, role: Role, name: str, around: Surroundings) -> None:
        self.role = role
        self.name = name
        self.lives = 0
        self.restart_s = 0.5
        self.away_until = 0.0
        self.stopped_s = 0.0
        self._stopped_at = 0.0
        self._around = around
        self._gate = ProcessGate()
        self._scope = trio.CancelScope()
        self._wiring = Wiring(around.network)

    def __str__(self) -> str:
        return self.name

    @property
    @abstractmethod
    def is_up(self) -> bool:
        """Return whether it is serving."""

    @property
    def is_frozen(self) -> bool:
        """Return whether it is stopped."""
        return not self._gate.is_open

    @property
    def is_running(self) -> bool:
        """Return whether it serves and is not stopped."""
        return self.is_up and not self.is_frozen

    async def keep(self) -> None:
        """Restart it whenever it exits. Runs outside the process itself."""
        while True:
            self.lives += 1
            self._gate = ProcessGate()
            self._scope = trio.CancelScope()
            self._wiring = Wiring(self._around.network)
            try:
                with self._scope, behind(self._gate):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._live)
            except* Exception as group:  # noqa: BLE001 (a real process would crash)
                self._around.report(f"{self.name} died of {_innermost(group)}")
            self._gone()
            self._around.note(f"{self.name} has ended")
            await trio.sleep(self.restart_s)

    def kill(self) -> None:
        """Kill it like SIGKILL, even if stopped."""
        self._gone()
        self._wiring.sever()
        self._scope.cancel()
        self._gate.open()

    def freeze(self) -> None:
        """Stop it like SIGSTOP. Idempotent."""
        if self._gate.is_open:
            self._stopped_at = trio.current_time()
        self._gate.close()

    def thaw(self) -> None:
        """Continue it like SIGCONT. Idempotent."""
        if not self._gate.is_open:
            self.away_until = trio.current_time()
            self.stopped_s = self.away_until - self._stopped_at
        self._gate.open()

    def spawn(self, nursery: trio.Nursery, fn: Callable[..., Awaitable[object]]) -> None:
        """Run a task as part of this process."""
        with behind(self._gate):
            nursery.start_soon(fn)

    def draw_epoch(self) -> int:
        """Return a new epoch."""
        return self._around.rng.getrandbits(64) or 1

    @abstractmethod
    async def _live(self) -> None:
        """Serve until it exits."""

    @abstractmethod
    def _gone(self) -> None:
        """Drop the state of the exited process. Idempotent."""


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        place = f"{code.co_filename.rsplit('/', 2)[-1]}:{traceback.tb_lineno} {code.co_name}"
        traceback = traceback.tb_next
    return f"{type(error).__name__}: {error} ({place})"
