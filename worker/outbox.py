"""A queue of outgoing frames: a worker's core adds them, the main loop sends them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transport.frames import AnyFrame


class Send(NamedTuple):
    """A frame for one peer of a listener."""

    to: bytes
    frame: AnyFrame


class Outbox:
    """Unsent frames, in order per listener.

    Bounded by its use: the loop empties it after each call of the core.
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
        """Remove and return the frames for the control listener."""
        taken, self._to_servers = self._to_servers, []
        return taken

    def take_for_senders(self) -> list[Send]:
        """Remove and return the frames for the kv listener."""
        taken, self._to_senders = self._to_senders, []
        return taken
