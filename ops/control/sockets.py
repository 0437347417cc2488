"""Sockets of control: Unix sockets that only this user can reach, and a port of this machine."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Final

from triolet.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

MASK: Final = 0o177
"""Leaves mode 0600."""
BACKLOG: Final = 64
"""Servers and commands of one fleet that connect at once."""
LOOPBACK: Final = "127.0.0.1"


def bind_private(path: Path) -> socket.socket:
    """Bind and listen; a socket that a killed process left there is replaced.

    Raises:
      ConfigError: it cannot be had.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(MASK)
    try:
        path.unlink(missing_ok=True)
        listening.bind(str(path))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen on {path}: {error}") from error
    finally:
        os.umask(before)
    listening.setblocking(False)
    return listening


def bind_port(port: int) -> socket.socket:
    """Bind and listen on a port that this machine alone reaches.

    Raises:
      ConfigError: it cannot be had.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((LOOPBACK, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"control.admin_port {port} cannot be had: {error.strerror}; stop what listens there, "
            "or choose another port"
        ) from error
    listening.setblocking(False)
    return listening
