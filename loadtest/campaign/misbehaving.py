"""Clients that close early or stop reading, on raw sockets: HTTP libraries do not do that."""

from __future__ import annotations

import base64
import json
import random
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import trio

from ..harness.http import connect

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def chat_request(name: str, host: str, body: bytes, *, close: bool = False) -> bytes:
    """Return the bytes of a POST for a chat completion.

    Args:
      name: value of X-Request-Id.
      host: value of the Host header.
      body: JSON body.
      close: whether to request `Connection: close`.
    """
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nx-request-id: {name}\r\n"
        f"connection: {'close' if close else 'keep-alive'}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def ws_handshake(name: str, host: str) -> bytes:
    """Return the request that opens a WebSocket to the Responses API."""
    key = base64.b64encode(random.randbytes(16)).decode()
    head = (
        f"GET /v1/responses HTTP/1.1\r\nhost: {host}\r\nx-request-id: {name}\r\n"
        f"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        f"sec-websocket-key: {key}\r\n\r\n"
    )
    return head.encode()


def ws_text_frame(body: bytes) -> bytes:
    """Return one masked text frame (RFC 6455, 5.2) with an all-zero mask."""
    if len(body) < 126:
        length = struct.pack("!B", 0x80 | len(body))
    else:
        length = struct.pack("!BH", 0x80 | 126, len(body))
    return b"\x81" + length + bytes(4) + body


MAX_WAIT_S = 1.2
"""Longest time until a socket is closed. The demo model has finished most answers by then."""
SOON_S = 0.3
EARLY_S = 0.03
"""One of four sockets is closed within this time and one within SOON_S, to hit queue, prefill and
transfer. The other two are closed at any time."""
CONNECT_DEADLINE_S = 60.0
MAX_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Cut:
    """A request with a closed socket.

    Attributes:
      name: the client's request id.
      kind: sse, ws or plain.
      closed_at: time of the close, in seconds since the epoch.
      url: where it was sent.
    """

    name: str
    kind: str
    closed_at: float
    url: str = ""


class Pace:
    """Limits the waits of clients, so that all requests fit into a time budget.

    Args:
      count: number of requests.
      clients: number of concurrent clients.
      budget_s: time for all requests.
    """

    def __init__(self, count: int, clients: int, budget_s: float) -> None:
        self._remaining = count
        self._clients = clients
        self._budget_s = budget_s
        self._began_at: float | None = None

    def next_wait_s(self, now: float) -> float:
        """Return the longest wait of the next request: twice its share of the remaining time.

        The mean wait is about a third of the longest one, which leaves a third of the share for the
        other costs of a request. A late client catches up.
        """
        if self._began_at is None:
            self._began_at = now
        left_s = max(0.0, self._began_at + self._budget_s - now)
        share_s = left_s * self._clients / max(1, self._remaining)
        self._remaining -= 1
        return min(MAX_WAIT_S, max(EARLY_S, 2 * share_s))


def _body(kind: str, rng: random.Random) -> bytes:
    filler = "and another dragon " * rng.choice((0, 1, 10, 60, 150))
    text = f"Tell me a story about dragon number {rng.randrange(10**6)} {filler}"
    message = {"role": "user", "content": text}
    if kind == "ws":
        request: dict[str, object] = {"type": "response.create", "input": [message]}
        return json.dumps(request | {"max_output_tokens": MAX_TOKENS}).encode()
    request = {"messages": [message], "stream": kind == "sse"}
    return json.dumps(request | {"max_tokens": MAX_TOKENS, "ignore_eos": True}).encode()


async def _swallow(stream: trio.SocketStream) -> None:
    """Read and discard the answer to its end."""
    while await stream.receive_some(65536):
        pass


async def _begin(stream: trio.SocketStream, name: str, kind: str, host: str, body: bytes) -> None:
    if kind != "ws":
        await stream.send_all(chat_request(name, host, body))
        return
    await stream.send_all(ws_handshake(name, host))
    await stream.receive_some(4096)
    await stream.send_all(ws_text_frame(body))


async def cut_one(url: str, name: str, rng: random.Random, max_wait_s: float = MAX_WAIT_S) -> Cut:
    """Start a request, wait for a random time, and close its socket."""
    kind = rng.choice(("sse", "ws", "plain"))
    wait_s = rng.uniform(0, rng.choice((EARLY_S, min(SOON_S, max_wait_s), max_wait_s, max_wait_s)))
    with trio.fail_after(CONNECT_DEADLINE_S):
        stream = await connect(url)
    try:
        # The client is about to close the connection anyway.
        with suppress(trio.BrokenResourceError):
            with trio.move_on_after(CONNECT_DEADLINE_S):
                await _begin(stream, name, kind, urlsplit(url).netloc, _body(kind, rng))
            with trio.move_on_after(wait_s):
                await _swallow(stream)
        if rng.random() < 0.5:  # RST instead of FIN
            linger = struct.pack("ii", 1, 0)
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    finally:
        closed_at = time.time()
        stream.socket.close()
    return Cut(name, kind, closed_at, url)


async def cut_many(
    urls: Sequence[str],
    numbers: Iterable[int],
    clients: int,
    seed: int,
    pace: Pace | None = None,
) -> list[Cut]:
    """Cut one request for each number, `clients` at a time, on these URLs in turn."""
    cuts: list[Cut] = []
    waiting = iter(numbers)

    async def client() -> None:
        for number in waiting:
            wait_s = MAX_WAIT_S if pace is None else pace.next_wait_s(time.monotonic())
            rng = random.Random(f"{seed} {number}")
            url = urls[number % len(urls)]
            cuts.append(await cut_one(url, f"cut-{number:06d}", rng, wait_s))

    async with trio.open_nursery() as nursery:
        for _ in range(clients):
            nursery.start_soon(client)
    return cuts


SMALL_BUFFER_BYTES = 4096
"""Size of the kernel's receive buffer. With a small one the stall begins earlier."""
TOP_LOGPROBS = 20
"""The maximum of the API: two kilobytes per token, the largest possible stream."""
HEAD_DEADLINE_S = 60.0
"""Timeout of a stream's first bytes, while all the others start too."""


@dataclass(slots=True)
class Stalled:
    """A client that has read the head of the answer and stopped reading.

    Attributes:
      kind: sse or ws.
      stream: its connection.
    """

    kind: str
    stream: trio.SocketStream


async def stall(url: str, number: int, max_tokens: int) -> Stalled:
    """Start an answer, over SSE or WebSocket in turn, and stop reading."""
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
            body = _chat_body(number, max_tokens)
            await stream.send_all(chat_request(name, where.netloc, body))
        await stream.receive_some(1)
    return Stalled(kind, stream)


def _question(number: int) -> str:
    return f"Tell me a story about dragon number {number}."


def _chat_body(number: int, max_tokens: int) -> bytes:
    body = {
        "messages": [{"role": "user", "content": _question(number)}],
        "stream": True,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": TOP_LOGPROBS,
    }
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
