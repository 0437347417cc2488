"""Opens control's listening sockets: Unix sockets private to this user, and a loopback port."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Final

from triolet.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

MASK: Final = 0o177
"""Umask for mode 0600."""
BACKLOG: Final = 64
"""Servers and commands of one fleet that connect at the same time."""
LOOPBACK: Final = "127.0.0.1"


def bind_private(path: Path) -> socket.socket:
    """Listen on a private Unix socket. Replaces a socket that a killed process left.

    Raises:
      ConfigError: cannot listen there.
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
    """Listen on a loopback port.

    Raises:
      ConfigError: cannot listen there.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((LOOPBACK, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on control.admin_port {port}: {error.strerror}; stop the process that "
            "listens there, or choose another port"
        ) from error
    listening.setblocking(False)
    return listening
