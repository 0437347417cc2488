"""Whether the server's port can be had, found out before anything is started."""

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
"""Behind a port that is in use, for one that is free and easy to remember."""


class PortTaken(ConfigError):
    """Another process has the port.

    Attributes:
      holder: the Triolet that has it; None if it is another program.
      free: a free port.
    """

    def __init__(self, host: str, port: int, holder: Holder | None, free: int) -> None:
        self.holder, self.free = holder, free
        who = "another program" if holder is None else holder.words
        super().__init__(
            f"port {port} on {host} is in use by {who}; stop it, or choose a port that is free: "
            f"triolet serve --port {free}"
        )


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
        raise _refusal(host, port, error) from error
    return bound


def free_port(host: str, port: int) -> int:
    """Return a free port: the next one above `port` if one of the next `PORTS_TRIED` is free.

    Raises:
      OSError: this host can listen nowhere.
    """
    for near in range(port + 1, min(port + 1 + PORTS_TRIED, 65_536)):
        with suppress(OSError), _bound(host, near) as bound:
            return int(bound.getsockname()[1])
    with _bound(host, 0) as bound:
        return int(bound.getsockname()[1])


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
        return _bound(host, port, is_shared=is_shared)
    except socket.gaierror as error:
        raise ConfigError(
            f"host {host!r} is no address of this machine ({error.strerror}); allowed: 127.0.0.1, "
            "or 0.0.0.0 for all of them"
        ) from error
    except OSError as error:
        raise _refusal(host, port, error) from error


def _bound(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    # IPv4 first, as the server chooses: `localhost` means one and the same address to both.
    family, kind, protocol, _, address = min(
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM),
        key=lambda info: info[0] != socket.AF_INET,
    )
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
    return bound


def _share(unbound: socket.socket) -> None:
    """Let several sockets of this user listen on the same port."""
    unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def _refusal(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return PortTaken(host, port, triolet_on(base_url(host, port), port), free_port(host, port))
    if error.errno == errno.EACCES:
        return ConfigError(
            f"port {port} needs more rights than this user has; choose one above 1023"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"{host} is no address of this machine; allowed: 127.0.0.1, or 0.0.0.0 for all"
        )
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror}")


def base_url(host: str, port: int) -> str:
    """Return the URL by which this machine reaches a server that listens there."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
