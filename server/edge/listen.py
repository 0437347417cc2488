"""Opens the listening sockets and accepts client connections on them.

The sockets are opened here rather than by hypercorn, because accepted connections inherit their
options.
"""

from __future__ import annotations

import errno
import socket
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio
from hypercorn.config import Config

from triolet.errors import ConfigError

from ..api.request_scope import UNIX_PEER
from .client_address import counted_address
from .connection_table import REFUSALS, ConnectionRefused, refusal_bytes
from .http import SharedByConnections
from .tcp import PatchedTCPServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from hypercorn.typing import ASGIFramework, ResponseSummary, WWWScope

    from triolet.config import PeerServersConfig, ServerConfig

    from ..peers.host_secret import HostSecret


OWN_BACKLOG: Final = 256
"""Backlog of a socket for peers and the supervisor. Requests passed on by peers wait there while
its server restarts."""
AFTER_STALL_S: Final = 1.0
"""The kernel treats a connection with a closed window like one to a dead host; a timeout below the
stall timeout would replace it."""


def open_listening_socket(config: ServerConfig) -> socket.socket:
    """Bind and listen, or listen on the inherited socket.

    An inherited socket is shared: other processes may accept on it too, and closing it here does
    not close it for them.

    Raises:
      ConfigError: the address cannot be used; the text says what to do.
    """
    where = f"{config.host}:{config.port}"
    if config.listen_fd is not None:
        try:
            listening = socket.socket(fileno=config.listen_fd)
        except OSError as error:
            raise ConfigError(
                f"server.listen_fd {config.listen_fd} is not a socket: {error}"
            ) from None
        return _listen(listening, None, config, where)
    try:
        # IPv4 first: "localhost" in a client's URL then works with and without IPv6.
        family, kind, protocol, _, address = min(
            socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM),
            key=lambda info: info[0] != socket.AF_INET,
        )
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host {config.host!r} cannot be resolved: {error}") from None
    return _listen(socket.socket(family, kind, protocol), address, config, where)


def open_own_socket(config: PeerServersConfig) -> socket.socket:
    """Listen on this server's own socket, which peers use to reach this server and no other.

    Raises:
      ConfigError: the inherited descriptor is not a socket.
    """
    try:
        own = socket.socket(fileno=config.own_fd)
        own.setblocking(False)
        own.listen(OWN_BACKLOG)
    except OSError as error:
        raise ConfigError(f"descriptor {config.own_fd} is not a usable socket: {error}") from None
    return own


def _listen(
    listening: socket.socket, address: tuple[Any, ...] | None, config: ServerConfig, where: str
) -> socket.socket:
    """Set the options that accepted connections inherit, bind if there is an address, and
    listen."""
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.send_buffer_bytes)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            timeout_s = max(config.tcp_user_timeout_s, config.stall_timeout_s + AFTER_STALL_S)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
        listening.setblocking(False)
        if address is not None:
            listening.bind(address)
        listening.listen(config.listen_backlog)
    except OSError as error:
        listening.close()
        raise ConfigError(_remedy(where, error)) from None
    return listening


def _remedy(where: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use: stop the process that listens there, or choose another port"
    if error.errno == errno.EACCES:
        return f"{where} needs privileges: choose a port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{where} is not an address of this machine: choose one of its own, or 127.0.0.1"
    return f"cannot listen on {where}: {error.strerror}"


def base_url(listening: socket.socket) -> str:
    """Return the URL for clients, with the port that was actually bound."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


log = structlog.get_logger(__name__)

REFUSAL_TIMEOUT_S = 1.0
"""Deadline for sending a refusal and for its client to read it."""
MAX_REFUSALS: Final = 64
"""Maximum refused connections that are waited for. Further ones are reset, and their clients may
not see the reason. Below the number of descriptors left beside `max_connections`."""


class EdgeLog:
    """Passes hypercorn's log messages to the process's log."""

    def __init__(self, config: Config) -> None:
        """Ignore the config that hypercorn passes."""

    async def access(self, request: WWWScope, response: ResponseSummary, seconds: float) -> None:
        """Ignore the access log: the application's own says more."""

    async def exception(self, message: str, *args: object) -> None:
        """Log the exception being handled."""
        log.exception(message % args if args else message)


def edge_config(bounds: ServerConfig) -> Config:
    """Return hypercorn's config: the fields that the patched parts read."""
    config = Config()
    config.logger_class = EdgeLog  # type: ignore[assignment]
    config.include_server_header = False
    config.keep_alive_timeout = bounds.idle_connection_s
    config.h11_max_incomplete_size = bounds.max_header_bytes
    config.websocket_max_message_size = bounds.ws_max_message_bytes
    return config


class Edge(SharedByConnections):
    """Accepts and serves client connections."""

    def __init__(
        self, app: ASGIFramework, bounds: ServerConfig, host_secret: HostSecret | None = None
    ) -> None:
        super().__init__(app, bounds, edge_config(bounds), host_secret)
        self._accepting = trio.CancelScope()
        self._stop = trio.Event()
        self._closed = trio.Event()
        self._num_refusals = 0
        self._close_within_s = 0.0

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self.places)

    @property
    def counters(
        self,
    ) -> tuple[Callable[[], int], Callable[[], Mapping[str, int]], Callable[[], Mapping[str, int]]]:
        """Return functions that read the number of open connections, writes by code path, and
        connections turned away."""
        return lambda: self.connections, lambda: self.writes, lambda: self.places.turned_away

    def stop_accepting(self) -> None:
        """Stop accepting, so that other processes on the socket take over; keep serving open
        connections."""
        self._accepting.cancel()

    def stop(self, within_s: float) -> None:
        """Stop accepting, close idle connections, and close the others after `within_s`."""
        self._close_within_s = within_s
        self._stop.set()

    async def wait_closed(self) -> None:
        """Wait until all connections have ended after `stop`."""
        await self._closed.wait()

    async def run(
        self,
        *listening: socket.socket,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until `stop`. Closes the listening sockets."""
        listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(one)) for one in listening]
        async with AsyncExitStack() as stack:
            for listener in listeners:
                await stack.enter_async_context(listener)
            connections = await stack.enter_async_context(trio.open_nursery())
            connections.start_soon(self._accept, listeners, connections)
            task_status.started()
            await self._stop.wait()
            self.stop_accepting()
            await self.context.terminated.set()
            connections.cancel_scope.deadline = trio.current_time() + self._close_within_s
        self._closed.set()

    async def _accept(
        self, listeners: list[trio.SocketListener], connections: trio.Nursery
    ) -> None:
        with self._accepting:
            await trio.serve_listeners(self._serve, listeners, handler_nursery=connections)

    def _serve(self, stream: trio.SocketStream) -> Awaitable[None]:
        """Return the coroutine that serves a connection. It is returned bare, because each read
        passes through every coroutine that awaits it."""
        try:
            host = _host_of(stream)
        except OSError:
            log.debug("connection_broken")
            return trio.aclose_forcefully(stream)  # noqa: ASYNC105 (Trio awaits it)
        speaks_for_many = host == UNIX_PEER or self.proxies.trusts(host)
        address = None if speaks_for_many else counted_address(host)
        place = self.places.admit(address, stream.socket.close)
        if isinstance(place, ConnectionRefused):
            self.refusals.tell(REFUSALS[place], trio.current_time(), client=host, where="edge")
            return self._refuse(stream, place)
        return PatchedTCPServer(self, stream, host, place).run()

    async def _refuse(self, stream: trio.SocketStream, reason: ConnectionRefused) -> None:
        """Send the reason and wait until it is read: closing with unread bytes would reset."""
        self._num_refusals += 1
        try:
            with trio.move_on_after(REFUSAL_TIMEOUT_S):
                await stream.send_all(refusal_bytes(REFUSALS[reason]))
                await stream.send_eof()
                while self._num_refusals <= MAX_REFUSALS and await stream.receive_some():
                    pass
        except trio.BrokenResourceError:
            log.debug("refused_connection_gone")
        finally:
            self._num_refusals -= 1
            await trio.aclose_forcefully(stream)


def _host_of(stream: trio.SocketStream) -> str:
    """Return the other end's address.

    Raises:
      OSError: the connection is gone.
    """
    if stream.socket.family == socket.AF_UNIX:
        return UNIX_PEER
    host: str = stream.socket.getpeername()[0]
    return host
