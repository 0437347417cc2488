"""The other servers on this port: which one owns an idempotency key, and requests to them."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import h11
import structlog
import trio

from ..contract.generation import CancelReason

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from triolet.config import PeerServersConfig


PeerStream: TypeAlias = "trio.SocketStream | trio.SSLStream[trio.SocketStream]"
_A = TypeVar("_A")
_R = TypeVar("_R")

READ_BYTES: Final = 65_536
ALONE: Final = "server"
"""Name of the only server on a port, for workers and audits."""


class PeerAnswer:
    """A response being read from a peer. The client's request owns it; when that ends, the
    connection closes.

    Args:
      stream: connection to the peer, over TLS or not.
      patience_s: maximum silence.
      on_end: called when the response has ended or was cancelled.
      host: the peer's host, for its Host header.

    Attributes:
      status: HTTP status.
      headers: response headers, in lower case.
    """

    def __init__(
        self,
        stream: PeerStream,
        patience_s: float,
        on_end: Callable[[PeerAnswer], None],
        host: str = "localhost",
    ) -> None:
        self._stream = stream
        self._on_end = on_end
        self._host = host
        self._patience_s = patience_s
        self._connection = h11.Connection(h11.CLIENT)
        self.status = 0
        self.headers: dict[str, str] = {}

    @property
    def has_begun(self) -> bool:
        """Whether workers may have started on it. The peer does not report this."""
        return True

    async def ask(
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[str, str]] = (),
        body: bytes = b"",
    ) -> None:
        """Send the request, and wait for the response's headers.

        Raises:
          OSError, trio.BrokenResourceError, h11.RemoteProtocolError: there is no response.
        """
        own = [("host", self._host), ("connection", "close"), ("content-length", str(len(body)))]
        sent = [(name.encode(), value.encode("latin-1")) for name, value in (*own, *headers)]
        request = h11.Request(method=method, target=target, headers=sent)
        head = self._connection.send(request) or b""
        content = self._connection.send(h11.Data(data=body)) or b""
        self._connection.send(h11.EndOfMessage())
        await self._in_time(self._stream.send_all, head + content)
        while not self.status:
            event = await self._next_event()
            if isinstance(event, h11.Response):
                self.status = event.status_code
                self.headers = {
                    name.decode(): value.decode("latin-1") for name, value in event.headers
                }

    async def next_data(self) -> bytes:
        """Return the next part of the body; empty at the end.

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
        """Close the connection. Idempotent."""
        del reason
        below = self._stream
        (below.transport_stream if isinstance(below, trio.SSLStream) else below).socket.close()
        self._on_end(self)

    async def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while (event := self._connection.next_event()) is h11.NEED_DATA:
            data = await self._in_time(self._stream.receive_some, READ_BYTES)
            self._connection.receive_data(bytes(data))
        return event

    async def _in_time(self, call: Callable[[_A], Awaitable[_R]], argument: _A) -> _R:
        with trio.move_on_after(self._patience_s):
            return await call(argument)
        raise trio.BrokenResourceError("the peer sent nothing in time")


log = structlog.get_logger(__name__)

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""Metrics of a server with a thousand workers take 2 MiB."""


class PeerAnswers:
    """The responses of peers that are being proxied. A drain waits for them."""

    def __init__(self) -> None:
        self._answers: set[PeerAnswer] = set()
        self._ended = trio.Event()

    def add(self, stream: PeerStream, patience_s: float, host: str = "localhost") -> PeerAnswer:
        """Return a response to be read from a connection. See `PeerAnswer`."""
        answer = PeerAnswer(stream, patience_s, self._end, host)
        self._answers.add(answer)
        return answer

    async def drain(self, within_s: float) -> None:
        """Wait until all have ended, up to a limit."""
        with trio.move_on_after(within_s):
            while self._answers:
                await self._ended.wait()

    def _end(self, answer: PeerAnswer) -> None:
        self._answers.discard(answer)
        self._ended.set()
        self._ended = trio.Event()


class Peers:
    """All servers on this port but this one.

    Args:
      config: their names and sockets.

    Attributes:
      own_name: this server's name.
      answers: responses from peers that are being proxied.
    """

    def __init__(self, config: PeerServersConfig) -> None:
        self.own_name = config.name
        self._paths = {name: path for name, path in config.paths if name != config.name}
        self._ask_timeout_s = config.ask_timeout_s
        self.answers = PeerAnswers()

    def owner_of(self, key: str) -> str | None:
        """Return the peer that owns a key; None if this server owns it.

        All servers compute the same owner, whether or not it is alive.
        """
        names = (self.own_name, *self._paths)
        owner = max(names, key=lambda name: blake2b(f"{name}\0{key}".encode()).digest())
        return None if owner == self.own_name else owner

    async def connect(self, name: str, patience_s: float) -> PeerAnswer:
        """Open a connection to a peer.

        Raises:
          OSError: the peer does not listen, or too many connections wait.
        """
        return self.answers.add(await trio.open_unix_socket(self._paths[name]), patience_s)

    async def ask(self, target: str) -> dict[str, bytes | None]:
        """Send a GET request to all peers concurrently.

        Returns:
          The bodies by name; None for a peer that did not answer with 200 in time.
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
        """Return the body if the status is 200, else None."""
        stream = await trio.open_unix_socket(self._paths[name])
        # The drain does not wait for this request.
        answer = PeerAnswer(stream, self._ask_timeout_s, lambda _: None)
        try:
            await answer.ask("GET", target)
            body = bytearray()
            while (data := await answer.next_data()) and len(body) <= MAX_ANSWER_BYTES:
                body += data
        finally:
            answer.cancel(CancelReason.CLIENT_GONE)
        return bytes(body) if not data and answer.status == 200 else None
