"""Text messages on their way to one WebSocket, in the order in which they were put in.

Knows their number of bytes, which is bounded: at the bound whoever has more waits, and with it the
credit of its tokens. One message more than the bound allows may be here, because a message is not
cut. Knows nothing of what they say.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..stream import Shortcut


class WsOutbox:
    """The outgoing side of one WebSocket.

    Args:
      max_bytes: what may wait before others have to.
      shortcut: of the connection.
    """

    def __init__(self, max_bytes: int, shortcut: Shortcut) -> None:
        self._max_bytes = max_bytes
        self._shortcut = shortcut
        self._messages: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_writing = self._is_closed = False
        self._changed = trio.Event()

    def try_send(self, message: bytes) -> bool:
        """Send at once, if nothing waits and that needs no waiting; return whether it was done."""
        is_idle = not (self._messages or self._is_writing or self._is_closed)
        return is_idle and self._shortcut.try_send(message)

    def put_nowait(self, message: bytes) -> bool:
        """Add a message if there is room; return whether there was."""
        if self._is_closed or self._num_bytes >= self._max_bytes:
            return False
        self._messages.append(message)
        self._num_bytes += len(message)
        self._change()
        return True

    async def put(self, message: bytes) -> None:
        """Add a message as soon as there is room.

        Raises:
          trio.ClosedResourceError: nothing more is taken.
        """
        await trio.lowlevel.checkpoint()
        while not self.put_nowait(message):
            if self._is_closed:
                raise trio.ClosedResourceError
            await self._changed.wait()

    def close(self) -> None:
        """Take nothing more; what is here is still written."""
        self._is_closed = True
        self._change()

    async def write(self, send: Callable[[str], Awaitable[None]]) -> None:
        """Write what comes until `close`, and then what is left."""
        while self._messages or not self._is_closed:
            if not self._messages:
                await self._changed.wait()
                continue
            message = self._messages.popleft()
            self._is_writing = True
            try:
                await send(message.decode())
            finally:
                self._is_writing = False
            self._num_bytes -= len(message)
            self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
