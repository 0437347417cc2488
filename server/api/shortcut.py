"""The short way from a token to its client: straight into the kernel, if that needs no waiting.

A task's turn, the application's send and the protocol's machinery together cost several times what
the write itself does. So whoever has a piece of an answer tries this first, and goes the usual way
where it fails. Knows what may be said of a try; the connection (server/edge) does it.
"""

from __future__ import annotations

from typing import Protocol


class Shortcut(Protocol):
    """A connection, between two pieces of an answer. Neither waits nor raises."""

    def try_send(self, data: bytes) -> bool:
        """Send a piece of the body of a response, or one text message of a WebSocket, in UTF-8.

        Returns:
          False if nothing was done: there is no room, something else is being written, or this is
          no moment for it. Then it has to go the usual way, which waits.
        """
        ...


class NoShortcut:
    """The connection of an application that something else serves."""

    def try_send(self, data: bytes) -> bool:
        """Take nothing."""
        return False
