"""Test helper that runs a socketserver in a thread beside the test."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator
    from socketserver import BaseServer

S = TypeVar("S", bound="BaseServer")


@contextmanager
def running_server(server: S) -> Iterator[S]:
    """Serve until the block ends."""
    with server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
