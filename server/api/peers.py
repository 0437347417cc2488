"""The other servers on this port: which of them owns a key, and what is asked of them."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final, TypeVar

import h11
import structlog
import trio

from ..contract.generation import CancelReason

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from triolet.config import PeerServersConfig


_A = TypeVar("_A")
_R = TypeVar("_R")

READ_BYTES: Final = 65_536
ALONE: Final = "server"
"""What workers and audits call the only server on a port."""


class PeerAnswer:
    """An answer that is being read. Its request holds it: the connection ends with that.

    Args:
      stream: to the peer.
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
        on_end: Callable[[PeerAnswer], None],
    ) -> None:
        self._stream = stream
        self._on_end = on_end
        self._patience_s = patience_s
        self._connection = h11.Connection(h11.CLIENT)
        self.status = 0
        self.headers: dict[str, str] = {}

    @property
    def has_begun(self) -> bool:
        """Whether anything may have been spent on it: the peer does not say."""
        return True

    async def ask(
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[str, str]] = (),
        body: bytes = b"",
    ) -> None:
        """Ask, and wait for the head of the answer.

        Raises:
          OSError, trio.BrokenResourceError, h11.RemoteProtocolError: there is no answer.
        """
        own = [("host", "localhost"), ("connection", "close"), ("content-length", str(len(body)))]
        request = h11.Request(method=method, target=target, headers=[*own, *headers])
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
        """Hang up, for which the peer needs no reason. Idempotent."""
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


log = structlog.get_logger(__name__)

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""Metrics of a server with a thousand workers take 2 MiB."""


class Peers:
    """All servers on this port but this one.

    Args:
      config: their names and sockets.
    """

    def __init__(self, config: PeerServersConfig) -> None:
        self.own_name = config.name
        self._paths = {name: path for name, path in config.paths if name != config.name}
        self._ask_timeout_s = config.ask_timeout_s
        self._answers: set[PeerAnswer] = set()
        self._ended = trio.Event()

    def owner_of(self, key: str) -> str | None:
        """Return which of the others keeps what a key names; None if this one does.

        All servers say the same of a key, whichever of them are alive.
        """
        names = (self.own_name, *self._paths)
        owner = max(names, key=lambda name: blake2b(f"{name}\0{key}".encode()).digest())
        return None if owner == self.own_name else owner

    async def connect(self, name: str, patience_s: float) -> PeerAnswer:
        """Open a connection to one of the others, which may say nothing for so long.

        Raises:
          OSError: it does not listen, or too many wait already.
        """
        stream = await trio.open_unix_socket(self._paths[name])
        answer = PeerAnswer(stream, patience_s, self._end)
        self._answers.add(answer)
        return answer

    async def drain(self, within_s: float) -> None:
        """Wait until all answers of others that are passed on here are over, or the time is."""
        with trio.move_on_after(within_s):
            while self._answers:
                await self._ended.wait()

    def _end(self, answer: PeerAnswer) -> None:
        self._answers.discard(answer)
        self._ended.set()
        self._ended = trio.Event()

    async def ask(self, target: str) -> dict[str, bytes | None]:
        """GET something of each at once.

        Returns:
          The bodies by name; None for a server that did not answer in time, or not with 200.
        """
        answers: dict[str, bytes | None] = dict.fromkeys(self._paths)

        async def ask_one(name: str) -> None:
            try:
                answers[name] = await self._get(name, target)
            except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError) as error:
                log.info("sibling_silent", server=name, reason=str(error))

        with trio.move_on_after(self._ask_timeout_s):
            async with trio.open_nursery() as nursery:
                for name in self._paths:
                    nursery.start_soon(ask_one, name)
        return answers

    async def _get(self, name: str, target: str) -> bytes | None:
        """Return the body of an answer with 200, or None for any other."""
        stream = await trio.open_unix_socket(self._paths[name])
        # No drain waits for it.
        answer = PeerAnswer(stream, self._ask_timeout_s, self._answers.discard)
        try:
            await answer.ask("GET", target)
            body = bytearray()
            while (data := await answer.next_data()) and len(body) <= MAX_ANSWER_BYTES:
                body += data
        finally:
            answer.cancel(CancelReason.CLIENT_GONE)
        return bytes(body) if not data and answer.status == 200 else None
