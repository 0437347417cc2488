"""A WebSocket client for tests that can misbehave: it builds frames byte by byte."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tests.server.support.surface import request_bytes

if TYPE_CHECKING:
    from tests.server.support.fakes import FakeGeneration
    from tests.server.support.surface import RawClient, Surface

TEXT, BINARY, CLOSE, PING, PONG = 0x1, 0x2, 0x8, 0x9, 0xA
CONTINUATION = 0x0
PATH = "/v1/responses"


class Frame(NamedTuple):
    """One frame from the server."""

    opcode: int
    payload: bytes

    @property
    def close_code(self) -> int:
        """The code in a close frame."""
        assert self.opcode == CLOSE
        code: int = struct.unpack("!H", self.payload[:2])[0]
        return code


def frame_bytes(
    opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0, masked: bool = True
) -> bytes:
    """Return a frame of a client. The mask is zero, so that payloads can be read by eye."""
    first = (0x80 if fin else 0) | rsv << 4 | opcode
    mask_bit = 0x80 if masked else 0
    size = len(payload)
    if size < 126:
        head = struct.pack("!BB", first, mask_bit | size)
    elif size < 65536:
        head = struct.pack("!BBH", first, mask_bit | 126, size)
    else:
        head = struct.pack("!BBQ", first, mask_bit | 127, size)
    return head + (b"\0\0\0\0" if masked else b"") + payload


class Socket:
    """An open WebSocket; closed at the end of its block."""

    def __init__(self, client: RawClient, headers: dict[str, str]) -> None:
        self.client = client
        self.headers = headers

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.stream.aclose()

    async def send(self, message: dict[str, Any] | str) -> None:
        """Send a text message."""
        text = message if isinstance(message, str) else json.dumps(message)
        await self.client.send(frame_bytes(TEXT, text.encode()))

    async def frame(self) -> Frame:
        """Read one frame."""
        first, size = await self.client.exactly(2)
        assert first & 0x70 == 0, "a reserved bit"
        if size == 126:
            (size,) = struct.unpack("!H", await self.client.exactly(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", await self.client.exactly(8))
        return Frame(first & 0xF, await self.client.exactly(size))

    async def event(self) -> dict[str, Any]:
        """Read one event, whatever pings come between."""
        while (frame := await self.frame()).opcode == PING:
            await self.client.send(frame_bytes(PONG, frame.payload))
        assert frame.opcode == TEXT, frame
        event: dict[str, Any] = json.loads(frame.payload)
        return event

    async def answer(
        self, message: dict[str, Any], end: str = "response.completed"
    ) -> list[dict[str, Any]]:
        """Send a message and read up to its answer's end."""
        await self.send(message)
        return await self.until(end)

    async def response(
        self, message: dict[str, Any], end: str = "response.completed"
    ) -> dict[str, Any]:
        """Send a message and return the response as it ended."""
        *_, last = await self.answer(message, end)
        response: dict[str, Any] = last["response"]
        return response

    async def until(self, kind: str) -> list[dict[str, Any]]:
        """Read events up to and including the first of a kind."""
        events = [await self.event()]
        while events[-1]["type"] != kind:
            events.append(await self.event())
        return events


def handshake(headers: dict[str, str] | None = None) -> bytes:
    """Return the request that opens a WebSocket."""
    usual = {
        "Host": "127.0.0.1",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": "MDEyMzQ1Njc4OWFiY2RlZg==",
        "Sec-WebSocket-Version": "13",
    }
    lines = [f"{name}: {value}" for name, value in (usual | (headers or {})).items() if value]
    return "\r\n".join([f"GET {PATH} HTTP/1.1", *lines, "", ""]).encode()


async def open_socket(server: Surface, headers: dict[str, str] | None = None) -> Socket:
    """Connect and shake hands."""
    client = await server.connect()
    await client.send(handshake(headers))
    status, answer = await client.head()
    assert status == 101
    return Socket(client, answer)


async def begin(server: Surface, client: RawClient, kind: str) -> FakeGeneration:
    """Begin a streamed answer, as events ("sse") or on a WebSocket ("ws")."""
    count = len(server.fleet.generations)
    if kind == "ws":
        await client.send(handshake())
        await client.head()
        await Socket(client, {}).send({"type": "response.create", "input": "hi"})
    else:
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True})
        await client.send(request_bytes("POST", "/v1/chat/completions", body=body.encode()))
        await client.head()
    return await server.fleet.nth(count)
