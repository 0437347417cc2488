"""The certificates that a client of HTTP needs."""

from __future__ import annotations

import ssl
from functools import cache

import httpx2


def verify_for(url: httpx2.URL | str) -> ssl.SSLContext | bool:
    """Return `verify` of an HTTP client: the system's authorities for https, else none.

    By itself httpx2 reads all certificates of the system for every client, also where nothing is
    encrypted: 25 to 45 ms of CPU time.

    Args:
      url: base address of what the client asks.

    Raises:
      httpx2.InvalidURL: `url` is no address.
    """
    return True if httpx2.URL(url).scheme == "https" else _no_authorities()


@cache
def _no_authorities() -> ssl.SSLContext:
    """Return what refuses every certificate, so that a client of http cannot end up on https."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
