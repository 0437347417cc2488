"""What every link does with what arrives: parse it, count what is no frame, shut its sender out.

Knows no sockets: message parts in, messages out. Used by the ZeroMQ links and the in-memory ones,
so that both treat an enemy alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from triolet.errors import RemoteProtocolError

from .codec import decode_message
from .link import MAX_BAD_FRAMES, Message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = structlog.get_logger()

MAX_REMEMBERED_SENDERS: Final = 1024
"""Senders of bad frames that are remembered; beyond, the one that began first is forgotten. Routing
ids cost a peer nothing, so this memory needs a bound."""


class FrameGate:
    """The entrance of one link.

    Args:
      max_frame_bytes: the most that a frame may have.
      before_blame: called before a bad frame is held against its sender, who may be new.

    Attributes:
      received_frames: good ones.
      bad_frames: those that were dropped, with all that came from senders shut out.
    """

    def __init__(
        self, max_frame_bytes: int, before_blame: Callable[[], None] | None = None
    ) -> None:
        self.received_frames = 0
        self.bad_frames = 0
        self._max_frame_bytes = max_frame_bytes
        self._before_blame = before_blame
        self._bad_by_sender: dict[bytes, int] = {}

    def admit(self, sender: bytes, parts: Sequence[bytes | memoryview]) -> Message | None:
        """Return the message that the parts hold, or None if they are dropped."""
        if self.is_shut_out(sender):
            self.bad_frames += 1
            return None
        try:
            frame, payload = decode_message(parts, self._max_frame_bytes)
        except RemoteProtocolError as error:
            self.bad_frames += 1
            if self._before_blame is not None:
                self._before_blame()
            self._blame(sender)
            # At most `MAX_BAD_FRAMES` lines a sender: what comes after is not parsed any more.
            log.warning("bad_frame", sender=repr(sender), error=str(error))
            return None
        self.received_frames += 1
        return Message(sender, frame, payload)

    def is_shut_out(self, sender: bytes) -> bool:
        """Whether this sender has sent `MAX_BAD_FRAMES` bad ones."""
        return self._bad_by_sender.get(sender, 0) >= MAX_BAD_FRAMES

    def forgive(self, sender: bytes) -> None:
        """Forget the sender's bad frames: a new process may stand behind the same name."""
        self._bad_by_sender.pop(sender, None)

    def _blame(self, sender: bytes) -> None:
        if sender not in self._bad_by_sender and (
            len(self._bad_by_sender) >= MAX_REMEMBERED_SENDERS
        ):
            del self._bad_by_sender[next(iter(self._bad_by_sender))]
        self._bad_by_sender[sender] = self._bad_by_sender.get(sender, 0) + 1
