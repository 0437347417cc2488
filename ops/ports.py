"""Whether the server's port can be had, found out before anything is started."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from triolet.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def claim_port(host: str, port: int) -> int:
    """Return a port that this host can listen on now: the given one, or for 0 any free one.

    Raises:
      ConfigError: as `bind_port`.
    """
    with bind_port(host, port) as bound:
        claimed: int = bound.getsockname()[1]
        return claimed


def bind_ports(host: str, port: int, count: int) -> list[socket.socket]:
    """Return as many sockets on one port as there are servers, among which the kernel spreads new
    connections; a single one shares with nobody.

    Raises:
      ConfigError: as `bind_port`.
    """
    if count == 1:
        return [bind_port(host, port)]
    bound = [bind_port(host, port, is_shared=True)]
    try:
        while len(bound) < count:
            another = socket.socket(bound[0].family, bound[0].type, bound[0].proto)
            bound.append(another)
            _share(another)
            another.bind(bound[0].getsockname())
    except OSError as error:
        for one in bound:
            one.close()
        raise ConfigError(_cause(host, port, error)) from error
    return bound


def bind_door(path: Path) -> socket.socket:
    """Return a Unix socket that is bound to a path and does not listen yet."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.bind(str(path))
    return bound


def bind_port(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a socket that is bound to a port which this host can listen on now.

    It does not listen: until a server does, clients are told that nobody is there. Once one has,
    connections wait for the next server when that one ends, as long as this socket is open.

    Raises:
      ConfigError: it is taken or may not be used, or there is no such address here.
    """
    try:
        # IPv4 first, as the server chooses: `localhost` means one and the same address to both.
        family, kind, protocol, _, address = min(
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM),
            key=lambda info: info[0] != socket.AF_INET,
        )
    except socket.gaierror as error:
        raise ConfigError(
            f"host {host!r} is no address of this machine ({error.strerror}); allowed: 127.0.0.1, "
            "or 0.0.0.0 for all of them"
        ) from error
    try:
        # Sockets that do not listen may share a port, so it is listening that finds out.
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            address = probe.getsockname()
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            _share(bound)
        bound.bind(address)
    except OSError as error:
        raise ConfigError(_cause(host, port, error)) from error
    return bound


def _share(unbound: socket.socket) -> None:
    """Let several sockets of this user listen on the same port."""
    unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def _cause(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use by another program; stop that program, or choose "
            f"another port with --port {port + 1 if port < 65_535 else 8000} (0 takes any free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has; choose one above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine; allowed: 127.0.0.1, or 0.0.0.0 for all"
    return f"cannot listen on {host} port {port}: {error.strerror}"


def base_url(host: str, port: int) -> str:
    """Return the URL by which this machine reaches a server that listens there."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
