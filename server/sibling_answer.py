"""The answer of another server on this port to a request that this one passed on.

Knows one connection and a little HTTP; what is passed on, and why, is the surface's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import h11
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from .generation import CancelReason

_A = TypeVar("_A")
_R = TypeVar("_R")

READ_BYTES: Final = 65_536


class SiblingAnswer:
    """An answer that is being read. Its request holds it: the connection ends with that.

    Args:
      stream: to the sibling.
      patience_s: how long it may say nothing at all.
      on_end: told once that it is over, or given up.

    Attributes:
      status: of its head.
      headers: of its head, in lower case.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        patience_s: float,
        on_end: Callable[[SiblingAnswer], None],
    ) -> None:
        self._stream = stream
        self._on_end = on_end
        self._patience_s = patience_s
        self._connection = h11.Connection(h11.CLIENT)
        self.status = 0
        self.headers: dict[str, str] = {}

    @property
    def has_begun(self) -> bool:
        """Whether anything may have been spent on it: the sibling does not say."""
        return True

    async def ask(self, target: str, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        """POST, and wait for the head of the answer.

        Raises:
          OSError, trio.BrokenResourceError, h11.RemoteProtocolError: there is no answer.
        """
        own = [("host", "localhost"), ("connection", "close"), ("content-length", str(len(body)))]
        request = h11.Request(method="POST", target=target, headers=[*own, *headers])
        head = self._connection.send(request) or b""
        content = self._connection.send(h11.Data(data=body)) or b""
        self._connection.send(h11.EndOfMessage())
        await self._in_time(self._stream.send_all, head + content)
        while not self.status:
            event = await self._next_event()
            if isinstance(event, h11.Response):
                self.status = event.status_code
                self.headers = {name.decode(): value.decode() for name, value in event.headers}

    async def next_data(self) -> bytes:
        """Return what comes next of the body; empty at its end.

        Raises:
          OSError, trio.BrokenResourceError, h11.RemoteProtocolError: it was cut off.
        """
        while True:
            event = await self._next_event()
            if isinstance(event, h11.EndOfMessage):
                return b""
            if isinstance(event, h11.Data) and event.data:
                return bytes(event.data)

    def cancel(self, reason: CancelReason) -> None:
        """Hang up, for which the sibling needs no reason. Idempotent."""
        del reason
        self._stream.socket.close()
        self._on_end(self)

    async def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while (event := self._connection.next_event()) is h11.NEED_DATA:
            data = await self._in_time(self._stream.receive_some, READ_BYTES)
            self._connection.receive_data(data)
        return event

    async def _in_time(self, call: Callable[[_A], Awaitable[_R]], argument: _A) -> _R:
        with trio.move_on_after(self._patience_s):
            return await call(argument)
        raise trio.BrokenResourceError("it says nothing")
