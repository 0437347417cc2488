"""What hypercorn's reader hands to an application, without waiting for one that has ended.

hypercorn puts messages into a bounded channel and never closes it: when the application ends with
the channel full, the reader, and whoever wants to say that the client left, wait for ever, and the
connection stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hypercorn.typing import ASGIReceiveEvent

    Put = Callable[[ASGIReceiveEvent], Awaitable[None]]


class AppInbox:
    """The way in to one run of the application."""

    def __init__(self) -> None:
        self._waiting: set[trio.CancelScope] = set()
        self._is_closed = False

    def in_front_of(self, put: Put) -> Put:
        """Return a way in that drops messages once nobody is there any more.

        Args:
          put: hypercorn's own, which waits for room.
        """

        async def put_or_drop(event: ASGIReceiveEvent) -> None:
            if self._is_closed:
                await trio.lowlevel.checkpoint()
                return
            with trio.CancelScope() as scope:
                self._waiting.add(scope)
                try:
                    await put(event)
                finally:
                    self._waiting.discard(scope)

        return put_or_drop

    def close(self) -> None:
        """Let nobody wait any more: the application has ended."""
        self._is_closed = True
        for scope in self._waiting:
            scope.cancel()
