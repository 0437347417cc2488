"""One connection to a server over Trio: an HTTP request and its answer, or a WebSocket.

Every way in which a connection breaks is one exception, apart from answers that fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import h11
import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Ping,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.utilities import ProtocolError as WsProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

RECEIVE_BYTES = 65536
CONNECT_TIMEOUT_S = 60.0
SILENCE_TIMEOUT_S = 60.0
"""A server that keeps its word says something within a recovery and a wait for a worker (30 s)."""


class ConnectionBrokenError(ConnectionError):
    """It was refused, reset or closed before the answer had ended."""


class Connection:
    """A TCP connection; an async context manager.

    Args:
      url: of the server.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.host = parts.netloc
        self._address = (parts.hostname, parts.port)
        self._stream: trio.SocketStream | None = None

    async def __aenter__(self) -> Connection:
        try:
            with trio.fail_after(CONNECT_TIMEOUT_S):
                self._stream = await trio.open_tcp_stream(*self._address)
        except (OSError, trio.TooSlowError) as error:
            raise ConnectionBrokenError(f"cannot connect: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.socket.close()

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        assert self._stream is not None
        try:
            await self._stream.send_all(data)
        except trio.BrokenResourceError as error:
            raise ConnectionBrokenError("reset while sending") from error

    async def receive(self) -> bytes:
        """Return some bytes; none at the end.

        Raises:
          ConnectionBrokenError: it was reset.
          trio.TooSlowError: nothing came for too long.
        """
        assert self._stream is not None
        try:
            with trio.fail_after(SILENCE_TIMEOUT_S):
                return bytes(await self._stream.receive_some(RECEIVE_BYTES))
        except trio.BrokenResourceError as error:
            raise ConnectionBrokenError("reset") from error


class HttpExchange:
    """A request, and the body of its answer.

    Args:
      connection: open, and used for nothing else.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._http = h11.Connection(h11.CLIENT)
        self._unread = b""

    async def ask(
        self, method: str, target: str, headers: dict[str, str], body: bytes = b""
    ) -> int:
        """Send a request and return the status of its answer."""
        fields = {
            "host": self._connection.host,
            "content-length": str(len(body)),
            "connection": "close",
        }
        head = h11.Request(method=method, target=target, headers=list((fields | headers).items()))
        data = self._http.send(head) or b""
        data += (self._http.send(h11.Data(data=body)) or b"") if body else b""
        data += self._http.send(h11.EndOfMessage()) or b""
        await self._connection.send(data)
        while True:
            event = await self._event()
            if isinstance(event, h11.Response):
                return event.status_code

    async def next_piece(self) -> bytes | None:
        """Return more of the body as it comes, or None at its end."""
        match await self._event():
            case h11.Data(data=data):
                return bytes(data)
            case _:
                return None

    async def next_line(self) -> bytes | None:
        """Return the body's next line without its end, or None at its end."""
        while b"\n" not in self._unread:
            piece = await self.next_piece()
            if piece is None:
                return None
            self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        return line.rstrip(b"\r")

    async def body(self) -> bytes:
        """Return the whole body."""
        whole = b""
        while (piece := await self.next_piece()) is not None:
            whole += piece
        return whole

    async def _event(self) -> object:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._connection.receive())
        except h11.RemoteProtocolError as error:
            raise ConnectionBrokenError(f"closed early: {error}") from error
        if isinstance(event, h11.ConnectionClosed):
            raise ConnectionBrokenError("closed before an answer")
        return event


class WebSocket:
    """A WebSocket after its handshake.

    Args:
      connection: open, and used for nothing else.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ws = WSConnection(ConnectionType.CLIENT)

    async def open(self, target: str, headers: dict[str, str]) -> None:
        """Do the handshake.

        Raises:
          ConnectionBrokenError: it was refused.
        """
        fields = [(name.encode(), value.encode()) for name, value in headers.items()]
        request = Request(host=self._connection.host, target=target, extra_headers=fields)
        await self._connection.send(self._ws.send(request))
        match await self._event():
            case AcceptConnection():
                return
            case RejectConnection(status_code=status):
                raise ConnectionBrokenError(f"handshake refused with {status}")
            case event:
                raise ConnectionBrokenError(f"no handshake: {event}")

    async def send_text(self, text: str) -> None:
        """Send one message."""
        await self._connection.send(self._ws.send(TextMessage(data=text)))

    async def next_message(self) -> bytes:
        """Return the next message.

        Raises:
          ConnectionBrokenError: the socket was closed; nobody asked for that.
        """
        parts: list[str] = []
        while True:
            match event := await self._event():
                case TextMessage(data=data, message_finished=is_whole):
                    parts.append(data)
                    if is_whole:
                        return "".join(parts).encode()
                case Ping():
                    await self._connection.send(self._ws.send(event.response()))
                case CloseConnection(code=code):
                    raise ConnectionBrokenError(f"closed with {code}")

    async def _event(self) -> object:
        try:
            while (event := next(self._ws.events(), None)) is None:
                data = await self._connection.receive()
                if not data:
                    raise ConnectionBrokenError("closed without a close frame")
                self._ws.receive_data(data)
        except WsProtocolError as error:
            raise ConnectionBrokenError(f"no WebSocket: {error}") from error
        return event


async def get(url: str, target: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """Return status and body of a GET."""
    async with Connection(url) as connection:
        exchange = HttpExchange(connection)
        status = await exchange.ask("GET", target, dict(headers or {}))
        return status, await exchange.body()
