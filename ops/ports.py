"""Binds the server's sockets, and explains why a port cannot be used."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from triolet.errors import ConfigError

from .port_holder import triolet_on

if TYPE_CHECKING:
    from pathlib import Path

    from .port_holder import Holder

PORTS_TRIED: Final = 100
"""Ports to try above one that is in use, for a free one that is easy to remember."""


class PortTaken(ConfigError):
    """The port is in use.

    Attributes:
      holder: the Triolet that occupies it; None for another program.
      free: a free port.
    """

    def __init__(self, host: str, port: int, holder: Holder | None, free: int) -> None:
        self.holder, self.free = holder, free
        who = "another program" if holder is None else holder.words
        super().__init__(
            f"port {port} on {host} is in use by {who}; stop it, or choose a free port: "
            f"triolet serve --port {free}"
        )


def claim_port(host: str, port: int) -> int:
    """Check that a port can be bound and return it; for 0, return a free one.

    Raises:
      ConfigError: see `bind_port`.
    """
    with bind_port(host, port) as bound:
        claimed: int = bound.getsockname()[1]
        return claimed


def bind_ports(host: str, port: int, count: int) -> list[socket.socket]:
    """Bind `count` sockets to one port. The kernel distributes new connections among them
    (SO_REUSEPORT); a single socket does not share the port.

    Raises:
      ConfigError: see `bind_port`.
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
        raise _refusal(host, port, error) from error
    return bound


def free_port(host: str, port: int) -> int:
    """Return a free port, preferably one of the next `PORTS_TRIED` above `port`.

    Raises:
      OSError: no port can be bound on this host.
    """
    for near in range(port + 1, min(port + 1 + PORTS_TRIED, 65_536)):
        with suppress(OSError), _bound(host, near) as bound:
            return int(bound.getsockname()[1])
    with _bound(host, 0) as bound:
        return int(bound.getsockname()[1])


def bind_door(path: Path) -> socket.socket:
    """Return a Unix socket that is bound to a path but does not listen yet."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.bind(str(path))
    return bound


def bind_port(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a socket that is bound to a port but does not listen.

    Connections are refused until a server listens on it. After that, while this socket is open,
    connections wait for the next server if the server ends.

    Raises:
      ConfigError: the port is in use or not permitted, or the host is not an address of this
        machine.
    """
    try:
        return _bound(host, port, is_shared=is_shared)
    except socket.gaierror as error:
        raise ConfigError(
            f"host {host!r} is not an address of this machine ({error.strerror}); allowed: "
            "127.0.0.1, or 0.0.0.0 for all addresses"
        ) from error
    except OSError as error:
        raise _refusal(host, port, error) from error


def _bound(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    # Prefer IPv4, as the server does, so that `localhost` means the same address to both.
    family, kind, protocol, _, address = min(
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM),
        key=lambda info: info[0] != socket.AF_INET,
    )
    # Only listen() detects a port in use: sockets that do not listen may share one.
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
    return bound


def _share(unbound: socket.socket) -> None:
    """Allow several sockets of this user to listen on the same port."""
    unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def _refusal(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return PortTaken(host, port, triolet_on(base_url(host, port), port), free_port(host, port))
    if error.errno == errno.EACCES:
        return ConfigError(f"this user is not permitted to use port {port}; choose one above 1023")
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"{host} is not an address of this machine; allowed: 127.0.0.1, or 0.0.0.0 for all"
        )
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror}")


def base_url(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server that listens on a host and port."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
