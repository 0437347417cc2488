"""Hands streams what has come for them: one turn of one task for all tokens of a frame.

Knows who is due, in which order, and how many go before others may run; what a stream does with its
tokens is its listener's.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from .stream import Stream

STREAMS_PER_CHECKPOINT: Final = 128
"""Streams that are handed their tokens before others may run: two or three milliseconds."""


class Handout:
    """Streams whose listeners are to be called, the longest due first. Each is here at most once,
    so there are never more than there are streams."""

    def __init__(self) -> None:
        self._due: deque[Stream] = deque()
        self._has_due = trio.Event()

    def add(self, stream: Stream) -> None:
        """Take note of a stream that has something for its listener."""
        self._due.append(stream)
        self._has_due.set()

    async def run(self) -> None:
        """Call listeners until cancelled."""
        due = self._due
        while True:
            await self._has_due.wait()
            for _ in range(min(len(due), STREAMS_PER_CHECKPOINT)):
                due.popleft().hand_out()
            if not due:
                self._has_due = trio.Event()
