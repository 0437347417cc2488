"""A client for the fault matrix: it streams one answer over SSE or WebSocket, and can disconnect or
stop reading."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import h11
import trio
import wsproto
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Ping,
    Request,
    TextMessage,
)

from .answer import Answer

if TYPE_CHECKING:
    from collections.abc import Iterator

READ_BYTES = 16 * 1024
SMALL_BUFFER_BYTES = 4096
"""Size of the receive buffer: bytes buffered by the kernel are not read by the client."""


class Surface(Enum):
    """How the answer arrives."""

    SSE = "SSE"
    WS = "WS"


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask; it determines the answer.

    Attributes:
      prompt: the user's message.
      max_tokens: length of the answer; end tokens are ignored.
      seed: sampling seed.
      top_logprobs: alternatives per token; they make each token about a kilobyte long.
    """

    prompt: str
    max_tokens: int
    seed: int
    top_logprobs: int = 0

    def body(self, surface: Surface) -> dict[str, Any]:
        """Return the request in a surface's format."""
        # Use a unique prompt: a cached prefix would leave nothing to compute in a held phase.
        common = {
            "seed": self.seed,
            "temperature": 1.0,
            "ignore_eos": True,
            "cache_salt": token_hex(8),
        }
        message = {"role": "user", "content": self.prompt}
        if surface is Surface.SSE:
            return common | {
                "messages": [message],
                "max_tokens": self.max_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
                "logprobs": True,
                "top_logprobs": self.top_logprobs,
            }
        return common | {
            "type": "response.create",
            "input": [message],
            "max_output_tokens": self.max_tokens,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": self.top_logprobs,
        }


class Client:
    """A connection with one question.

    Args:
      port: the server's port on this machine.
      surface: SSE or WebSocket.
      question: what to ask.
      name: the client's request id.

    Attributes:
      answer: what has arrived so far.
      is_over: set when nothing more will come: a success, a failure, or a broken connection.
      num_bytes: bytes received.
    """

    def __init__(self, port: int, surface: Surface, question: Question, name: str) -> None:
        self.answer = Answer()
        self.is_over = trio.Event()
        self.num_bytes = 0
        self.name = name
        self.surface = surface
        self.question = question
        self._port = port
        self._stream: trio.SocketStream | None = None
        self._may_read = trio.Event()
        self._may_read.set()
        self._http = h11.Connection(h11.CLIENT)
        self._ws = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        self._sse_rest = b""
        self._ws_rest = ""

    async def ask(self) -> None:
        """Connect, and send the whole question."""
        raw = trio.socket.socket()
        raw.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        await raw.connect(("127.0.0.1", self._port))
        self._stream = trio.SocketStream(raw)
        body = json.dumps(self.question.body(self.surface))
        host = f"127.0.0.1:{self._port}"
        if self.surface is Surface.SSE:
            post = h11.Request(
                method="POST",
                target="/v1/chat/completions",
                headers=[
                    ("host", host),
                    ("x-request-id", self.name),
                    ("content-type", "application/json"),
                    ("content-length", str(len(body))),
                ],
            )
            await self._send(self._http.send(post) or b"")
            await self._send(self._http.send(h11.Data(data=body.encode())) or b"")
            await self._send(self._http.send(h11.EndOfMessage()) or b"")
            return
        headers = [(b"x-request-id", self.name.encode())]
        await self._send(
            self._ws.send(Request(host=host, target="/v1/responses", extra_headers=headers))
        )
        while not any(
            isinstance(event, AcceptConnection) for event in self._ws_events(await self._receive())
        ):
            pass
        await self._send(self._ws.send(TextMessage(body)))

    async def read(self) -> None:
        """Read until nothing more comes; pauses after `stop_reading`."""
        try:
            while not self.answer.is_done:
                await self._may_read.wait()
                data = await self._receive()
                if not data:
                    break
                await self._take(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
            pass
        finally:
            self.is_over.set()

    def stop_reading(self) -> None:
        """Leave further bytes in the socket."""
        self._may_read = trio.Event()

    def go_on_reading(self) -> None:
        """Resume reading."""
        self._may_read.set()

    def reset(self) -> None:
        """Disconnect with RST."""
        linger = struct.pack("ii", 1, 0)
        self._socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, linger)
        self._socket.close()

    def close(self) -> None:
        """Disconnect with FIN (the kernel sends RST if unread bytes remain). Idempotent."""
        if self._stream is not None:
            self._stream.socket.close()

    async def say_close(self) -> None:
        """Send a WebSocket close frame; the connection stays open."""
        with suppress(trio.BrokenResourceError):
            await self._send(self._ws.send(CloseConnection(code=1000)))

    @property
    def _socket(self) -> trio.socket.SocketType:
        assert self._stream is not None
        return self._stream.socket

    async def _send(self, data: bytes) -> None:
        assert self._stream is not None
        await self._stream.send_all(data)

    async def _receive(self) -> bytes:
        assert self._stream is not None
        data = bytes(await self._stream.receive_some(READ_BYTES))
        self.num_bytes += len(data)
        return data

    async def _take(self, data: bytes) -> None:
        if self.surface is Surface.WS:
            for event in self._ws_events(data):
                if isinstance(event, TextMessage):
                    self._ws_rest += event.data
                    if event.message_finished:
                        self.answer.take_ws(self._ws_rest)
                        self._ws_rest = ""
                elif isinstance(event, Ping):
                    await self._send(self._ws.send(event.response()))
            return
        self._http.receive_data(data)
        while True:
            part = self._http.next_event()
            if isinstance(part, h11.Response) and part.status_code != 200:
                self.answer.ends.append(f"status:{part.status_code}")
            elif isinstance(part, h11.Data):
                self._take_sse(bytes(part.data))
            elif not isinstance(part, h11.Response):
                return

    def _take_sse(self, data: bytes) -> None:
        *lines, self._sse_rest = (self._sse_rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                self.answer.take_sse(line.removeprefix(b"data: ").decode())

    def _ws_events(self, data: bytes) -> Iterator[wsproto.events.Event]:
        if data:
            self._ws.receive_data(data)
            yield from self._ws.events()
