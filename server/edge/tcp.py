"""One TCP connection: its reads, its writes with a deadline, and its end."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from typing import TYPE_CHECKING, Any, Final, NoReturn

import structlog
import trio
from hypercorn.events import Closed, RawData, Updated
from hypercorn.trio.task_group import TaskGroup, _handle
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.utils import parse_socket_addr

from triolet.errors import RequestError

from ..api.errors import http_error
from ..api.request_scope import ClientConnection
from ..contract.generation import CancelReason
from .client_address import Preamble, counted_address
from .connection_table import REFUSALS
from .http import PatchedH11Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hypercorn.config import Config
    from hypercorn.events import Event
    from hypercorn.typing import AppWrapper, ASGIReceiveEvent, Scope

    from .connection_table import ConnectionPlace
    from .http import SharedByConnections


ENOUGH_BYTES: Final = 64 * 1024
"""What a reader must take within the limit to count as alive."""
FIRST_WAIT_S: Final = 0.05
LAST_WAIT_S: Final = 1.0
"""Waits double from the first to the last. Writing is tried after each, because the kernel takes
bytes long before it says that there is room (a third of its buffer). Some it takes a fifth of a
second after a client's window has shut, as if to probe it: found at once they belong to the
beginning of a stall, found a second later they would put off its end by as much. Of a wait that
took longer than it should, because nothing ran here meanwhile, no more counts than it should have
taken."""


class WriteDeadline:
    """How long one write waits for a client that takes nothing, and when it is tried again.

    Args:
      limit_s: without enough progress, until it is over.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = self._left_s = limit_s
        self._wait_s = FIRST_WAIT_S
        self._num_bytes = 0

    @property
    def is_over(self) -> bool:
        """Whether the deadline is over."""
        return self._left_s <= 0

    @property
    def wait_s(self) -> float:
        """How long to wait before the next try."""
        return min(self._wait_s, self._left_s)

    def took(self, num_bytes: int) -> None:
        """Note bytes that the client took."""
        self._wait_s = FIRST_WAIT_S
        self._num_bytes += num_bytes
        if self._num_bytes >= ENOUGH_BYTES:
            self._left_s, self._num_bytes = self._limit_s, 0

    def waited(self, seconds: float) -> None:
        """Note a wait for room."""
        self._left_s -= min(seconds, self._wait_s)
        self._wait_s = min(2 * self._wait_s, LAST_WAIT_S)


log = structlog.get_logger(__name__)


CUT_AFTER_STALL_S: Final = 0.5
"""Beyond the stall bound: what runs for the client ends first, by its own clock and with its reason
known; then the connection is cut, whatever ran on it."""
GOODBYE_TIMEOUT_S: Final = 1.0
"""Longest wait for the client's end of the stream after the server's end was sent."""
SENDS_PER_CHECKPOINT: Final = 16
"""Writes that never wait let other tasks run this often."""
RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


class AppTasks(TaskGroup):
    """The tasks of one connection, among them the runs of the application.

    hypercorn puts what is for a run into a bounded channel and never closes it: when the run ends
    with the channel full, the reader and every notice of a disconnect would wait for ever, and the
    connection would stay. Here the channel ends with the run, and what still comes is dropped.
    """

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Scope, send: Callable[..., Awaitable[None]]
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        """Run the application; return how events are put into its channel."""
        entrance: trio.MemorySendChannel[ASGIReceiveEvent]
        entrance, exit_ = trio.open_memory_channel(config.max_app_queue_size)

        async def run(*arguments: Any) -> None:  # noqa: ANN401 (hypercorn's)
            with exit_:
                await app(*arguments)

        async def put_or_drop(event: ASGIReceiveEvent) -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                await entrance.send(event)

        in_threads = trio.to_thread.run_sync, trio.from_thread.run
        self.spawn(_handle, run, config, scope, exit_.receive, send, *in_threads)
        return put_or_drop


class PatchedTCPServer(TCPServer):
    """Serves one accepted connection until it ends.

    Args:
      edge: of which it is a connection.
      stream: the connection.
      host: address of the other end, or UNIX_PEER.
      place: of the connection; left at its end.

    Attributes:
      place: as above.
    """

    protocol: PatchedH11Protocol  # type: ignore[assignment]

    def __init__(
        self,
        edge: SharedByConnections,
        stream: trio.SocketStream,
        host: str,
        place: ConnectionPlace,
    ) -> None:
        super().__init__(edge.app, edge.config, edge.context, {}, stream)  # type: ignore[arg-type]
        self._edge = edge
        self.place = place
        self._remote = ClientConnection(host)
        self._bounds = edge.bounds
        self._cut_after_s = edge.bounds.stall_timeout_s + CUT_AFTER_STALL_S
        self._sends = 0
        self._rest = b""
        self._writes = edge.writes
        self._has_ended = self._is_closing = False
        self._receiving = trio.CancelScope()
        self._preamble = Preamble() if edge.proxies.trusts(host) else None

    async def run(self) -> None:
        """Serve until the client or a deadline ends it. Raises nothing of the client's making."""
        sock = self.stream.socket
        try:
            addresses = (
                parse_socket_addr(sock.family, sock.getpeername()),
                parse_socket_addr(sock.family, sock.getsockname()),
            )
            async with AppTasks() as task_group:
                self._task_group = task_group
                self.protocol = PatchedH11Protocol(
                    self._edge, task_group, addresses, self._remote, self
                )
                await self.idle_task.restart(task_group, self._idle_timeout)
                await self._read_data()
        except* OSError:
            log.debug("connection_broken")
        except* Exception:
            # A bug met by one connection must not take the others with it.
            log.exception("connection_failed")
        finally:
            self._let_go()
            try:
                await self._close()
            finally:
                self._edge.places.leave(self.place)

    def _let_go(self) -> None:
        """Break reference cycles, so that the connection is freed at once: Python's collector runs
        after thousands of connections."""
        self._remote.let_go()
        if hasattr(self, "protocol"):  # it may have broken before
            del self.protocol

    async def protocol_send(self, event: Event) -> None:
        """Do what the protocol wants: write, close, or start and stop the idle clock."""
        if isinstance(event, RawData):
            await self._write(event.data)
        elif isinstance(event, Closed):
            await self._say_goodbye()
            self._edge.places.rest(self.place)
            await self.protocol.handle(Closed())
        elif not (isinstance(event, Updated) and self._has_ended):
            # An idle clock started after the last read would keep a dead connection for its time.
            if isinstance(event, Updated):
                self._note_idle(event.idle)
            await super().protocol_send(event)
            if self.protocol.can_continue:
                self._receiving.cancel()

    def _note_idle(self, is_idle: bool) -> None:
        places = self._edge.places
        (places.rest if is_idle else places.work)(self.place)

    def try_write(self, data: bytes) -> bool:
        """Write without waiting, if nothing else is being written and the kernel takes any of it.

        What it does not take goes before everything else, by a task of the connection's own.

        Returns:
          False if nothing was done.
        """
        if self._rest or self._is_closing or self.send_lock.locked():
            return False
        try:
            sent = self._send_now(data)
        except trio.BrokenResourceError as error:
            self._note_stall(error)
            return False  # the usual way finds out that the client is gone
        if sent == 0:
            return False
        self._writes["direct"] += 1
        if sent < len(data):
            self._rest = data[sent:]
            self._task_group.spawn(self._write, b"")
        return True

    async def _say_goodbye(self) -> None:
        """Send the end of the stream; the reading side closes once the client has sent its own.

        Closing with bytes unread would reset the connection, and the reset overtakes the answer: a
        client that is still sending its too large body would never see the 413.
        """
        if not self.send_lock.locked():
            with contextlib.suppress(
                trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError
            ):
                await self.stream.send_eof()
        self._is_closing = True
        self._receiving.cancel()

    async def _hear_goodbye(self) -> None:
        with (
            trio.move_on_after(GOODBYE_TIMEOUT_S),
            contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError),
        ):
            while await self.stream.receive_some(MAX_RECV):
                pass

    async def _read_data(self) -> None:
        opened_at = head_began_at = trio.current_time()
        while not self._is_closing:
            if self.protocol.can_continue:
                head_began_at = trio.current_time()
                await self.protocol.handle(RawData(data=b""))
            with trio.CancelScope() as self._receiving:
                scope = self._receiving
                if not self.protocol.has_had_request:
                    scope.deadline = opened_at + self._bounds.header_timeout_s
                elif self.protocol.awaits_head:
                    scope.deadline = head_began_at + self._bounds.header_timeout_s
                try:
                    data = await self.stream.receive_some(MAX_RECV)
                except (trio.ClosedResourceError, trio.BrokenResourceError) as error:
                    self._note_stall(error)
                    break
            if scope.cancelled_caught:
                if self.protocol.can_continue or self._is_closing:
                    continue
                if self.protocol.awaits_head:
                    await self.protocol.refuse(
                        http_error(408, "the request's head did not arrive in time")
                    )
                break
            if not data:
                break
            if not self.protocol.awaits_head:
                head_began_at = trio.current_time()
            if self._preamble is not None and not (data := await self._open(data)):
                continue
            await self.protocol.handle(RawData(data=bytes(data)))
            del data  # up to 64 KiB of a request, as long as its answer runs
        self._has_ended = True
        await self.idle_task.stop()
        await self.protocol.handle(Closed())
        if self._is_closing:
            await self._hear_goodbye()

    async def _open(self, data: bytes | bytearray) -> bytes:
        """Take the first bytes of a trusted proxy's connection; return those of the request."""
        assert self._preamble is not None, "asked for only then"
        try:
            opening = self._preamble.feed(bytes(data))
        except RequestError as error:
            await self.protocol.refuse(error)
            return b""
        if opening is None:
            return b""
        self._preamble = None
        if opening.host is not None:
            self.protocol.speak_for(opening.host)
            if not self._edge.proxies.trusts(opening.host):
                address = counted_address(opening.host)
                refused = self._edge.places.attribute(self.place, address)
                if refused is not None:
                    await self.protocol.refuse(REFUSALS[refused])
                    return b""
        return opening.rest

    async def _write(self, data: bytes) -> None:
        # Taken without a checkpoint: between the first half of a frame and the second there may be
        # neither another writer nor a cancellation.
        if self.send_lock.locked():
            await self.send_lock.acquire()
        else:
            self.send_lock.acquire_nowait()
        try:
            if self._rest:
                data, self._rest = self._rest + data, b""
            self._writes["usual"] += 1
            sent = self._send_now(data) if data else 0
            if sent < len(data):
                await self._send_rest(memoryview(data)[sent:])
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._note_stall(error)
            is_broken = True
        else:
            is_broken = False
        finally:
            self.send_lock.release()
        if is_broken:
            await self.protocol.handle(Closed())
        self._sends += 1
        if self._sends % SENDS_PER_CHECKPOINT == 0:
            await trio.lowlevel.checkpoint()

    def _note_stall(self, error: Exception) -> None:
        """Note the reason if TCP_USER_TIMEOUT ended a connection that took nothing."""
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.ETIMEDOUT:
            self._remote.disconnect_reason = CancelReason.STALLED

    def _send_now(self, data: bytes | memoryview) -> int:
        # Not part of trio's interface: its socket only has a send that may wait.
        raw: socket.socket = self.stream.socket._sock
        try:
            return raw.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise trio.BrokenResourceError from error

    async def _send_rest(self, view: memoryview) -> None:
        deadline = WriteDeadline(self._cut_after_s)
        while view:
            sent = self._send_now(view[:ENOUGH_BYTES])
            if sent:
                view = view[sent:]
                deadline.took(sent)
                continue
            if deadline.is_over:
                await self._cut()
            began_at = trio.current_time()
            # Shielded, because half a frame would garble everything behind it.
            with trio.CancelScope(shield=True) as scope:
                scope.deadline = began_at + deadline.wait_s
                await trio.lowlevel.wait_writable(self.stream.socket)
            deadline.waited(trio.current_time() - began_at)

    async def _cut(self) -> NoReturn:
        log.info("client_stopped_reading", peer=self.protocol.client)
        self._remote.disconnect_reason = CancelReason.STALLED
        self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        await trio.aclose_forcefully(self.stream)
        raise trio.BrokenResourceError
