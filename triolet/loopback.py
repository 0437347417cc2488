"""Detect host names and addresses that only this machine can reach, without a resolver."""

from __future__ import annotations

import ipaddress
from typing import Final

LOOPBACK_NAMES: Final = frozenset({"localhost"})


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a socket bound to `host`."""
    if host.lower() in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
