"""Frames that a core has decided to send, until the loop takes them.

Knows routing ids of the two listeners; knows no sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transport.frames import AnyFrame


class Send(NamedTuple):
    """A frame for one peer of a listener."""

    to: bytes
    frame: AnyFrame


class Outbox:
    """Everything decided and not yet sent, in order per listener.

    Bounded by its use: the loop empties it after each call into the core.
    """

    def __init__(self) -> None:
        self._to_servers: list[Send] = []
        self._to_senders: list[Send] = []

    def to_server(self, server: bytes, frame: AnyFrame) -> None:
        """Send over the control listener."""
        self._to_servers.append(Send(server, frame))

    def to_sender(self, sender: bytes, frame: AnyFrame) -> None:
        """Send over the kv listener, to a prefill worker."""
        self._to_senders.append(Send(sender, frame))

    def take_for_servers(self) -> list[Send]:
        """Return and forget what goes over the control listener."""
        taken, self._to_servers = self._to_servers, []
        return taken

    def take_for_senders(self) -> list[Send]:
        """Return and forget what goes over the kv listener."""
        taken, self._to_senders = self._to_senders, []
        return taken
