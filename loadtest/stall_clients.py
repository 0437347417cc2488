"""Clients of one server: some stop reading within an answer, others read theirs to the end.

Knows sockets and what arrives on them; judges nothing.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import trio

from .raw_requests import chat_request, ws_handshake, ws_text_frame
from .readers import End, Piece, read_chat_sse

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL_BUFFER_BYTES = 4096
"""What a kernel takes for its client is no reading: with a small buffer the stall comes sooner."""
TOP_LOGPROBS = 20
"""The most that may be asked for: two kilobytes a token, the heaviest stream there is."""
HEAD_DEADLINE_S = 60.0
"""To a stream's first bytes, behind all the others that begin."""


@dataclass(slots=True)
class Stalled:
    """A client that asked, read the head of the answer and nothing more.

    Attributes:
      kind: sse or ws.
      stream: its connection.
      ended: how it ended once it read on: `reset` or `closed`; empty before.
    """

    kind: str
    stream: trio.SocketStream
    ended: str = ""


async def stall(url: str, number: int, max_tokens: int) -> Stalled:
    """Begin an answer, over SSE or WebSocket in turn, and stop reading."""
    where = urlsplit(url)
    kind = "ws" if number % 2 else "sse"
    raw = trio.socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    await raw.connect((where.hostname, where.port))
    stream = trio.SocketStream(raw)
    name = f"stalled-{number}"
    with trio.fail_after(HEAD_DEADLINE_S):
        if kind == "ws":
            await stream.send_all(ws_handshake(name, where.netloc))
            await stream.receive_some(SMALL_BUFFER_BYTES)
            await stream.send_all(ws_text_frame(_response_body(number, max_tokens)))
        else:
            body = _chat_body(_question(number), max_tokens, top_logprobs=TOP_LOGPROBS)
            await stream.send_all(chat_request(name, where.netloc, body))
        await stream.receive_some(1)
    return Stalled(kind, stream)


async def read_on(client: Stalled) -> None:
    """Read what is left; note whether the connection was reset or closed."""
    try:
        while await client.stream.receive_some(65536):
            pass
    except trio.BrokenResourceError:
        client.ended = "reset"
    else:
        client.ended = "closed"
    await trio.aclose_forcefully(client.stream)


@dataclass(slots=True)
class Reader:
    """A client that reads as fast as it can, one answer after the other.

    Attributes:
      number: chooses its question.
      max_tokens: of each answer.
      gaps: (when, how long) between writes that brought text, of all answers.
      texts: each distinct text that an answer had; greedy answers to one question have one.
      num_answers: that ended well.
    """

    number: int
    max_tokens: int
    gaps: list[tuple[float, float]] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    num_answers: int = 0

    async def run(self, url: str) -> None:
        """Ask and read until cancelled.

        Raises:
          StreamFailedError: an answer did not end as it should.
        """
        while True:
            await self.read_one(url)

    async def read_one(self, url: str) -> None:
        """Ask once and read the whole answer.

        Raises:
          StreamFailedError: it did not end as it should.
        """
        where = urlsplit(url)
        assert where.hostname is not None
        assert where.port is not None
        body = _chat_body(_question(self.number), self.max_tokens)
        received = bytearray()
        last: float | None = None
        async with await trio.open_tcp_stream(where.hostname, where.port) as stream:
            await stream.send_all(
                chat_request(f"reader-{self.number}", where.netloc, body, close=True)
            )
            async for data in stream:
                now = trio.current_time()
                received += data
                if b'"content":' in data:
                    if last is not None:
                        self.gaps.append((now, now - last))
                    last = now
        self._check(bytes(received))

    def _check(self, received: bytes) -> None:
        # The size of each chunk stands on a line of its own, which is no `data:` line.
        lines = (line.rstrip(b"\r") for line in received.split(b"\n"))
        text = ""
        for part in read_chat_sse(lines):
            match part:
                case Piece():
                    text += part.text
                case End():
                    self.texts.add(text)
                    self.num_answers += 1


def new_readers(count: int, max_tokens: int) -> Sequence[Reader]:
    """Return readers with questions of their own."""
    return [Reader(number, max_tokens) for number in range(count)]


def _question(number: int) -> str:
    return f"Tell me a story about dragon number {number}."


def _chat_body(question: str, max_tokens: int, top_logprobs: int | None = None) -> bytes:
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    if top_logprobs is None:
        body["stream_options"] = {"include_usage": True}
    else:
        body |= {"logprobs": True, "top_logprobs": top_logprobs}
    return json.dumps(body).encode()


def _response_body(number: int, max_tokens: int) -> bytes:
    body = {
        "type": "response.create",
        "input": _question(number),
        "max_output_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": TOP_LOGPROBS,
    }
    return json.dumps(body).encode()
