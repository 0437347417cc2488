"""HTTP GET and a WebSocket client on Trio. See streams.py for reading streamed answers."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import httpx2
import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Ping,
    Pong,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.utilities import ProtocolError as WsProtocolError

from .streams import StreamBrokenError

if TYPE_CHECKING:
    from collections.abc import Mapping

RECEIVE_BYTES = 65536
TIMEOUT_S = 60.0
"""Read timeout. A working server sends data within a recovery plus a wait for a worker (30 s)."""
NO_CERTIFICATES: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Without certificates: servers here do not use TLS, and loading the system's takes 20 ms."""


async def get(url: str, target: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """Return status and body of a GET.

    Raises:
      StreamBrokenError: there was no answer, or an incomplete one.
    """
    try:
        async with httpx2.AsyncClient(verify=NO_CERTIFICATES, timeout=TIMEOUT_S) as client:
            answer = await client.get(url + target, headers=headers)
    except httpx2.TransportError as error:
        raise StreamBrokenError(f"no answer: {error!r}") from error
    return answer.status_code, answer.content


async def connect(url: str) -> trio.SocketStream:
    """Open a connection for raw bytes."""
    where = urlsplit(url)
    return await trio.open_tcp_stream(where.hostname or "", where.port or 80)


class WebSocket:
    """A WebSocket with one exception for all failures. An async context manager.

    Args:
      url: address of the server.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._ws = WSConnection(ConnectionType.CLIENT)

    async def __aenter__(self) -> WebSocket:
        try:
            with trio.fail_after(TIMEOUT_S):
                self._stream = await connect(self._url)
        except (OSError, trio.TooSlowError) as error:
            raise StreamBrokenError(f"cannot connect: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stream.socket.close()

    async def open(self, target: str, headers: Mapping[str, str]) -> None:
        """Perform the handshake.

        Raises:
          StreamBrokenError: the server refused it.
        """
        fields = [(name.encode(), value.encode()) for name, value in headers.items()]
        host = urlsplit(self._url).netloc
        await self._send(Request(host=host, target=target, extra_headers=fields))
        match await self._event():
            case AcceptConnection():
                return
            case RejectConnection(status_code=status):
                raise StreamBrokenError(f"handshake refused with {status}")
            case event:
                raise StreamBrokenError(f"no handshake: {event}")

    async def send_text(self, text: str) -> None:
        """Send a text message."""
        await self._send(TextMessage(data=text))

    async def next_message(self) -> bytes:
        """Return the next message.

        Raises:
          StreamBrokenError: the server closed the socket.
          trio.TooSlowError: no message came in time.
        """
        parts: list[str] = []
        while True:
            match event := await self._event():
                case TextMessage(data=data, message_finished=is_whole):
                    parts.append(data)
                    if is_whole:
                        return "".join(parts).encode()
                case Ping():
                    await self._send(event.response())
                case CloseConnection(code=code):
                    raise StreamBrokenError(f"closed with {code}")

    async def _send(self, event: Request | TextMessage | Pong) -> None:
        try:
            await self._stream.send_all(self._ws.send(event))
        except trio.BrokenResourceError as error:
            raise StreamBrokenError("reset while sending") from error

    async def _event(self) -> object:
        try:
            while (event := next(self._ws.events(), None)) is None:
                with trio.fail_after(TIMEOUT_S):
                    data = await self._stream.receive_some(RECEIVE_BYTES)
                if not data:
                    raise StreamBrokenError("closed without a close frame")
                self._ws.receive_data(data)
        except (WsProtocolError, trio.BrokenResourceError) as error:
            raise StreamBrokenError(f"violated the WebSocket protocol: {error!r}") from error
        return event
