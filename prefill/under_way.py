"""Chunks on the wire to one receiver, and the window that they hold until they are answered.

Knows keys, slots and times of sending; does not know what becomes of a chunk that was answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transport.window import ByteWindow
    from triolet.ids import AttemptKey

    from .ring import Slot
    from .transfer import Chunk


class Sent(NamedTuple):
    """A chunk that is not answered yet."""

    slot: Slot
    sent_at: float


class UnderWay:
    """What is on the wire.

    Attributes:
      window: what the receiver lets be there; None until it has said so.
    """

    def __init__(self) -> None:
        self.window: ByteWindow | None = None
        # An attempt that ended keeps its entries until they are answered: its bytes are on the
        # wire all the same.
        self._sent: dict[tuple[AttemptKey, int], Sent] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def __contains__(self, chunk: tuple[AttemptKey, int]) -> bool:
        return chunk in self._sent

    @property
    def num_bytes(self) -> int:
        """Of all payloads."""
        return sum(len(sent.slot.memory) for sent in self._sent.values())

    def has_room(self, num_bytes: int) -> bool:
        """Return whether that much may be sent now."""
        return self.window is not None and self.window.has_room(num_bytes)

    def send(self, key: AttemptKey, chunk: Chunk, now: float) -> None:
        """Note that a chunk is sent, for which the window has room."""
        assert self.window is not None, "sent before the receiver said WELCOME"
        is_taken = self.window.try_consume(chunk.num_bytes)
        assert is_taken, "sent beyond the window"
        self.note_sent(key, chunk, now)

    def note_sent(self, key: AttemptKey, chunk: Chunk, now: float) -> None:
        """Note that a chunk is sent, maybe once more."""
        self._sent[key, chunk.frame.index] = Sent(chunk.slot, now)
        chunk.sent_at = now

    def settle(self, key: AttemptKey, index: int) -> Slot | None:
        """Give a chunk's window back and return its slot; None if it is not on the wire."""
        sent = self._sent.pop((key, index), None)
        if sent is None:
            return None
        if self.window is not None:
            self.window.release(len(sent.slot.memory))
        return sent.slot

    def of(self, key: AttemptKey) -> list[int]:
        """Return the indices of one attempt's chunks."""
        return [index for owner, index in self._sent if owner == key]

    def unanswered(self, now: float, longer_than_s: float) -> list[tuple[AttemptKey, int]]:
        """Return what was sent longer ago than that."""
        return [c for c, sent in self._sent.items() if now - sent.sent_at > longer_than_s]

    def all(self) -> list[tuple[AttemptKey, int]]:
        """Return everything."""
        return list(self._sent)
