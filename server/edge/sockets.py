"""The listening socket. Ours rather than hypercorn's, because what is set on it is inherited by
every accepted connection. Knows addresses and socket options; accepts nothing."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, Any, Final

from triolet.errors import ConfigError

if TYPE_CHECKING:
    from triolet.config import ServerConfig
    from triolet.config_siblings import SiblingConfig

OWN_BACKLOG: Final = 256
"""Of a socket that only siblings and the supervisor know. While its server is started again,
requests wait there that siblings pass on."""
AFTER_STALL_S: Final = 1.0
"""The kernel takes a window that stays shut for a dead host; a shorter patience than the stall
bound's would take its place."""


def open_listening_socket(config: ServerConfig) -> socket.socket:
    """Bind and listen, or listen on the socket that was handed down.

    One that was handed down is shared: whoever else has it may accept on it too, and closing it
    here closes it for nobody else.

    Raises:
      ConfigError: the address cannot be had; the text says what to do.
    """
    where = f"{config.host}:{config.port}"
    if config.listen_fd is not None:
        try:
            listening = socket.socket(fileno=config.listen_fd)
        except OSError as error:
            raise ConfigError(f"--listen-fd {config.listen_fd} is no socket: {error}") from None
        return _listen(listening, None, config, where)
    try:
        # IPv4 first: "localhost" in a client's URL reaches it with and without IPv6.
        family, kind, protocol, _, address = min(
            socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM),
            key=lambda info: info[0] != socket.AF_INET,
        )
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host {config.host!r} cannot be resolved: {error}") from None
    return _listen(socket.socket(family, kind, protocol), address, config, where)


def open_own_socket(config: SiblingConfig) -> socket.socket:
    """Listen on the socket by which this very server is reached, whoever else has its port.

    Raises:
      ConfigError: what was handed down is no socket.
    """
    try:
        own = socket.socket(fileno=config.own_fd)
        own.setblocking(False)
        own.listen(OWN_BACKLOG)
    except OSError as error:
        raise ConfigError(f"descriptor {config.own_fd} is no socket of ours: {error}") from None
    return own


def _listen(
    listening: socket.socket, address: tuple[Any, ...] | None, config: ServerConfig, where: str
) -> socket.socket:
    """Set what accepted connections inherit, bind if there is an address, and listen."""
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
        return f"{where} is no address of this machine: choose one of its own, or 127.0.0.1"
    return f"cannot listen on {where}: {error.strerror}"


def base_url(listening: socket.socket) -> str:
    """Return the address clients use, with the port that was really bound."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
