"""Hands streams what has come for them: one turn of one task for all tokens of a frame, the very
turn that took it where they are few.

Tenants take turns, stream by stream: however many streams one has, another one's token waits for as
many of them as there are tenants. Knows who is due, in which order, and how many go before others
may run; what a stream does with its tokens is its listener's.
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
    """Streams whose listeners are to be called, of each tenant the longest due first. Each is here
    at most once, so there are never more than there are streams."""

    def __init__(self) -> None:
        self._due: dict[str, deque[Stream]] = {}  # of tenants of whom some are; whose turn is first
        self._has_due = trio.Event()
        self._is_collecting = False

    def add(self, stream: Stream) -> None:
        """Take note of a stream that has something for its listener."""
        self._due.setdefault(stream.request.claim.tenant, deque()).append(stream)
        if not self._is_collecting:
            self._has_due.set()

    def collect(self) -> None:
        """Leave what comes from now on to `hand_out_collected`."""
        self._is_collecting = True

    def hand_out_collected(self) -> None:
        """Hand out what has come since `collect`, without a turn of another task; beyond what one
        turn may hand out, the rest follows as usual."""
        self._is_collecting = False
        if self._due and not self._has_due.is_set():
            self._hand_out()

    async def run(self) -> None:
        """Call listeners until cancelled."""
        while True:
            await self._has_due.wait()
            self._has_due = trio.Event()
            self._hand_out()

    def _hand_out(self) -> None:
        num_left = min(sum(map(len, self._due.values())), STREAMS_PER_CHECKPOINT)
        while num_left > 0:
            tenant = next(iter(self._due))
            of_tenant = self._due.pop(tenant)
            if not self._due:
                # Alone: no turns to take. Who becomes due meanwhile comes after these.
                self._due[tenant] = of_tenant
                for _ in range(min(num_left, len(of_tenant))):
                    num_left -= 1
                    of_tenant.popleft().hand_out()
                if not of_tenant:
                    del self._due[tenant]
                continue
            num_left -= 1
            stream = of_tenant.popleft()
            if of_tenant:
                self._due[tenant] = of_tenant
            stream.hand_out()
        if self._due:
            self._has_due.set()
