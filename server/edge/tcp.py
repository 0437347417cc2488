"""One client TCP connection: reads requests, writes with a deadline, and closes."""

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
"""Bytes that a reader must take within the limit to count as alive."""
FIRST_WAIT_S: Final = 0.05
LAST_WAIT_S: Final = 1.0
"""Waits double from the first to the last. A write is tried after each, because the kernel accepts
bytes long before it reports room (a third of its buffer). It accepts some a fifth of a second after
a client's window has closed, as if to probe it: found at once, they belong to the start of a stall;
found a second later, they would delay its end by as much. If a wait took longer than planned
because this process was busy, only the planned time counts."""


class WriteDeadline:
    """The deadline of one write to a client that reads nothing, and the times to retry.

    Args:
      limit_s: time without enough progress until the deadline is over.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = self._left_s = limit_s
        self._wait_s = FIRST_WAIT_S
        self._num_bytes = 0

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self._left_s <= 0

    @property
    def wait_s(self) -> float:
        """Time to wait before the next attempt."""
        return min(self._wait_s, self._left_s)

    def took(self, num_bytes: int) -> None:
        """Record bytes that the client took."""
        self._wait_s = FIRST_WAIT_S
        self._num_bytes += num_bytes
        if self._num_bytes >= ENOUGH_BYTES:
            self._left_s, self._num_bytes = self._limit_s, 0

    def waited(self, seconds: float) -> None:
        """Record a wait for room."""
        self._left_s -= min(seconds, self._wait_s)
        self._wait_s = min(2 * self._wait_s, LAST_WAIT_S)


log = structlog.get_logger(__name__)


CUT_AFTER_STALL_S: Final = 0.5
"""Time beyond the stall timeout, so that what runs for the client ends first, by its own clock and
with a known reason; then the connection is cut, whatever runs on it."""
GOODBYE_TIMEOUT_S: Final = 1.0
"""Maximum wait for the client to close its end after the server closed its own."""
SENDS_PER_CHECKPOINT: Final = 16
"""Number of non-waiting writes after which other tasks may run."""
RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


class AppTasks(TaskGroup):
    """The tasks of one connection, including runs of the application.

    hypercorn puts a run's events into a bounded channel that it never closes: if the run ended with
    the channel full, the reader and every disconnect notice would wait for ever, and the connection
    would stay open. Here the channel ends with the run, and later events are dropped.
    """

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Scope, send: Callable[..., Awaitable[None]]
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        """Run the application; return the function that sends it events."""
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
      edge: what all connections share.
      stream: the connection.
      host: address of the other end, or UNIX_PEER.
      place: its place in the table of connections; left at its end.

    Attributes:
      place: its place in the table of connections.
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
        """Serve until the client or a deadline ends the connection. Client errors are not
        raised."""
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
            # A bug on one connection must not end the others.
            log.exception("connection_failed")
        finally:
            self._let_go()
            try:
                await self._close()
            finally:
                self._edge.places.leave(self.place)

    def _let_go(self) -> None:
        """Break reference cycles, so that the connection is freed at once: the garbage collector
        runs only after thousands of connections."""
        self._remote.let_go()
        if hasattr(self, "protocol"):  # missing if the connection broke early
            del self.protocol

    async def protocol_send(self, event: Event) -> None:
        """Apply the protocol's event: write, close, or start and stop the idle timeout."""
        if isinstance(event, RawData):
            await self._write(event.data)
        elif isinstance(event, Closed):
            await self._say_goodbye()
            self._edge.places.rest(self.place)
            await self.protocol.handle(Closed())
        elif not (isinstance(event, Updated) and self._has_ended):
            # An idle timeout started after the last read would keep a dead connection open.
            if isinstance(event, Updated):
                self._note_idle(event.idle)
            await super().protocol_send(event)
            if self.protocol.can_continue:
                self._receiving.cancel()

    def _note_idle(self, is_idle: bool) -> None:
        places = self._edge.places
        (places.rest if is_idle else places.work)(self.place)

    def try_write(self, data: bytes) -> bool:
        """Write without waiting, if no other write is in progress and the kernel accepts any bytes.

        A task of the connection sends the remaining bytes before anything else.

        Returns:
          False if nothing was written.
        """
        if self._rest or self._is_closing or self.send_lock.locked():
            return False
        try:
            sent = self._send_now(data)
        except trio.BrokenResourceError as error:
            self._note_stall(error)
            return False  # the normal write detects that the client is gone
        if sent == 0:
            return False
        self._writes["direct"] += 1
        if sent < len(data):
            self._rest = data[sent:]
            self._task_group.spawn(self._write, b"")
        return True

    async def _say_goodbye(self) -> None:
        """Close the sending side; the reading side closes once the client has closed its own.

        Closing with unread bytes would reset the connection, and the reset overtakes the answer: a
        client still sending an oversized body would never see the 413.
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
            del data  # up to 64 KiB of a request would be kept while its answer runs
        self._has_ended = True
        await self.idle_task.stop()
        await self.protocol.handle(Closed())
        if self._is_closing:
            await self._hear_goodbye()

    async def _open(self, data: bytes | bytearray) -> bytes:
        """Parse the first bytes of a trusted proxy's connection; return those of the request."""
        assert self._preamble is not None, "called only with a preamble"
        try:
            opening = self._preamble.feed(bytes(data))
        except RequestError as error:
            await self.protocol.refuse(error)
            return b""
        if opening is None:
            return b""
        self._preamble = None
        if opening.is_unnamed or opening.host is not None:
            self.protocol.speak_for(opening.host)
        if opening.host is not None and not self._edge.proxies.trusts(opening.host):
            refused = self._edge.places.attribute(self.place, counted_address(opening.host))
            if refused is not None:
                await self.protocol.refuse(REFUSALS[refused])
                return b""
        return opening.rest

    async def _write(self, data: bytes) -> None:
        # Acquire without a checkpoint: neither another writer nor a cancellation may come between
        # the two halves of a frame.
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
        """Record a stall if TCP_USER_TIMEOUT ended a connection that took nothing."""
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.ETIMEDOUT:
            self._remote.disconnect_reason = CancelReason.STALLED

    def _send_now(self, data: bytes | memoryview) -> int:
        # Trio's public socket API only has a send that may wait.
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
            # Shielded, because half a frame would corrupt everything after it.
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
