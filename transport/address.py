"""Parse link addresses (`ipc://path`, `tcp://host:port`) and check that they are safe to use.

An ipc socket must lie in a directory that only this user can reach; a tcp port needs CURVE keys.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from triolet.errors import ConfigError

MAX_IPC_PATH_BYTES: Final = 107
"""`sun_path` has 108 bytes; the last one is a NUL."""

# A host's name is also its key file's name, which may have at most 255 bytes.
_TCP = re.compile(
    r"tcp://(?P<host>\[[\w:.%]{1,60}\]|[\w.-]{1,240}|\*):(?P<port>\d{1,5}|\*)", re.ASCII
)
_FORMS = "allowed: ipc:///directory/name, tcp://host:port"


@dataclass(frozen=True, slots=True)
class IpcAddress:
    """A Unix socket path on this host."""

    path: Path

    def __str__(self) -> str:
        return f"ipc://{self.path}"

    def require_private_directory(self) -> None:
        """Raise a ConfigError if other users can reach the directory."""
        directory = self.path.parent
        remedy = f"create it with: mkdir -p -m 700 {directory}"
        try:
            found = directory.stat()
        except OSError as error:
            raise ConfigError(f"{self}: no directory {directory} ({error}); {remedy}") from error
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{self}: {directory} is not a directory; {remedy}")
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"{self}: {directory} belongs to user {found.st_uid}, not to user "
                f"({os.geteuid()}); use a directory of your own"
            )
        mode = stat.S_IMODE(found.st_mode)
        if mode & 0o077:
            raise ConfigError(
                f"{self}: {directory} has mode {mode:04o}, so others may reach the socket; "
                f"allowed: 0700 (chmod 700 {directory})"
            )

    def require_unused(self) -> None:
        """Raise a ConfigError if a process listens there.

        libzmq would otherwise unlink the path and silently take over the address.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(self.path))
            except BlockingIOError:
                pass  # a listener whose backlog is full
            except OSError:
                return
        raise address_in_use(str(self))


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP port. Port 0 means any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port or '*'}"

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host


Address: TypeAlias = IpcAddress | TcpAddress
ANY_INTERFACE: Final = frozenset({"0.0.0.0", "::", "[::]", "*"})
"""Hosts that a process can listen on but no peer can connect to."""


def parse_address(address: str) -> Address:
    """Parse an address.

    Raises:
      ConfigError: the form is unknown, or an ipc path is too long.
    """
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not path.startswith("/") or path.endswith("/") or not path.isprintable():
            raise ConfigError(
                f"address {address!r}: an ipc path must be absolute and printable; {_FORMS}"
            )
        length = len(os.fsencode(path))
        if length > MAX_IPC_PATH_BYTES:
            raise ConfigError(
                f"address {address!r}: its path has {length} bytes; allowed: at most "
                f"{MAX_IPC_PATH_BYTES}. Choose a shorter directory, such as /tmp/triolet"
            )
        return IpcAddress(Path(path))
    match = _TCP.fullmatch(address)
    if match is None:
        raise ConfigError(f"address {address!r} has no known form; {_FORMS}")
    port = 0 if match["port"] == "*" else int(match["port"])
    if port > 65_535:
        raise ConfigError(f"address {address!r}: port {port} does not exist; allowed: 0 to 65535")
    return TcpAddress(match["host"], port)


def require_dialable(address: str) -> None:
    """Check that peers can connect to an address.

    Raises:
      ConfigError: the form is unknown, or the address names more than one host or port.
    """
    place = parse_address(address)
    if isinstance(place, TcpAddress) and (place.port == 0 or place.host in ANY_INTERFACE):
        raise ConfigError(
            f"cannot connect to {address!r}; allowed: one host and one port at which processes "
            "reach it"
        )


def address_in_use(address: str) -> ConfigError:
    """Return the error for an address that is in use."""
    return ConfigError(
        f"address {address} is in use by another process; stop that process or choose another "
        "address"
    )


def keys_needed(address: str) -> ConfigError:
    """Return the error for a tcp address without keys, which every user of the host could reach."""
    return ConfigError(
        f"other users can reach {address}, and there are no CURVE keys; make them with "
        "`triolet keys make DIR` and set curve_dir of every process to DIR, or use ipc:// in a "
        "directory of mode 0700"
    )
