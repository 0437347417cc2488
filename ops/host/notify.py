"""sd_notify: the states that `triolet serve` tells the service manager that started it.

Protocol: sd_notify(3). One datagram to the unix socket that $NOTIFY_SOCKET names.
"""

from __future__ import annotations

import os
import socket
from typing import Final

import structlog

VARIABLE: Final = "NOTIFY_SOCKET"
READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"

log = structlog.get_logger(__name__)


def tell_service_manager(*states: str) -> None:
    """Send states in one datagram; do nothing where no service manager asks for them.

    Never waits and never raises: a state that cannot be sent is a warning in the log.

    Args:
      states: assignments such as `READY=1`.
    """
    address = os.environ.get(VARIABLE, "")
    if not address:
        return
    # A leading @ is a name in the abstract namespace, which the kernel writes as a zero byte.
    name = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(states).encode(), name)
    except OSError as error:
        log.warning("notify_failed", address=address, states=states, reason=str(error))
