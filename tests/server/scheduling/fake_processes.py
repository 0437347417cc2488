"""Fake workers for tests of the scheduler, as processes on an in-memory network: they listen,
greet, send heartbeats and compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from transport.frames import Hello
from transport.link import PeerGone

if TYPE_CHECKING:
    from transport.frames import AnyFrame
    from transport.link import Listener
    from transport.memory_network import MemoryNetwork

    from .fakes import FakeDecode, FakePrefill

STEP_S = 0.01
BEAT_S = 0.5


class FakeProcess:
    """One process of a worker. Kill it by leaving or cancelling `run`.

    Attributes:
      is_held: it answers and sends heartbeats but computes nothing.
      servers: routing ids of servers that sent HELLO to this process.
    """

    def __init__(
        self,
        network: MemoryNetwork,
        worker: FakeDecode | FakePrefill,
        decodes: list[FakeDecode] | None = None,
    ) -> None:
        self.worker = worker
        self._awake = trio.Event()
        self._awake.set()
        self.is_held = False
        self._network = network
        self._decodes = decodes
        self.servers: set[bytes] = set()
        self._scope = trio.CancelScope()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until killed."""
        with self._scope:
            listener = self._network.listen(
                f"mem://{self.worker.name}", hwm=1000, max_frame_bytes=2**20
            )
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read, listener)
                    nursery.start_soon(self._beat, listener)
                    nursery.start_soon(self._compute, listener)
                    task_status.started()
            finally:
                listener.close()

    def kill(self) -> None:
        """Kill the process without a farewell."""
        self._scope.cancel()

    @property
    def is_frozen(self) -> bool:
        return not self._awake.is_set()

    def freeze(self) -> None:
        """Stop the process, like SIGSTOP."""
        self._awake = trio.Event()

    def thaw(self) -> None:
        """Continue the process, like SIGCONT."""
        self._awake.set()

    async def _read(self, listener: Listener) -> None:
        while True:
            messages = await listener.receive_many()
            await self._awake.wait()
            for message in messages:
                if isinstance(message.frame, Hello):
                    self.servers.add(message.sender)
                    self.worker.server = str(message.frame.peer.peer_id)
                    self._say(listener, message.sender, self.worker.welcome())
                    self._say(listener, message.sender, self.worker.heartbeat())
                elif message.sender in self.servers:
                    for answer in self.worker.take(message.frame):
                        self._say(listener, message.sender, answer)

    async def _beat(self, listener: Listener) -> None:
        while True:
            await trio.sleep(BEAT_S)
            if not self.is_frozen:
                self._say_all(listener, self.worker.heartbeat())

    async def _compute(self, listener: Listener) -> None:
        while True:
            await trio.sleep(STEP_S)
            if self.is_frozen or self.is_held:
                continue
            for frame in self._step():
                self._say_all(listener, frame)

    def _step(self) -> list[AnyFrame]:
        if self._decodes is None:
            return self.worker.step()  # type: ignore[call-arg]
        return self.worker.step(self._decodes)  # type: ignore[call-arg]

    def _say_all(self, listener: Listener, frame: AnyFrame) -> None:
        for server in list(self.servers):
            self._say(listener, server, frame)

    def _say(self, listener: Listener, server: bytes, frame: AnyFrame) -> None:
        try:
            listener.send_nowait(server, frame)
        except PeerGone:
            self.servers.discard(server)
