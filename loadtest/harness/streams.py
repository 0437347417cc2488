"""A minimal HTTP client on raw sockets for load generation, with hardly any parsing.

Clients share the machine with the server under test, so they must use little CPU. Measured with
1,000 streams of 10 tokens/s: 9 us of CPU per token here, 11 if Trio waits for the selector, 21 with
a Trio task per socket.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
EVENT: Final = b"data: {"
DONE: Final = b"data: [DONE]"
CHUNKS_END: Final = b"0\r\n\r\n"
KEPT_BYTES: Final = 16
"""Last bytes to keep, because a marker may be split between two reads."""
LENGTH: Final = re.compile(rb"\r\ncontent-length: ?(\d+)\r\n", re.IGNORECASE)
CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding: ?chunked\r\n", re.IGNORECASE)
CLOSED: Final = re.compile(rb"\r\nconnection: ?close\r\n", re.IGNORECASE)
RETRY_AFTER: Final = re.compile(rb"\r\nretry-after: ?([\d.]+)\r\n", re.IGNORECASE)
USED: Final = re.compile(rb'"completion_tokens": ?(\d+)')
CODE: Final = re.compile(rb'"code": ?"(\w+)"')
RECEIVE_BYTES: Final = 64 * 1024
"""Size of one read. From 128 KiB on, the C library may map memory for each read, which takes 16 us
instead of 2."""
TIMEOUT_S: Final = 240.0
"""Timeout of connecting and of an answer: far longer than any measurement."""


class StreamBrokenError(ConnectionError):
    """The connection failed, or the answer is an error or ended early."""


def post(path: str, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a POST request."""
    body = json.dumps(fields).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{more}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def completion(prompt: Sequence[int], max_tokens: int, **more: object) -> dict[str, object]:
    """Return the fields of a greedy completion with a fixed number of tokens."""
    fields = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
    return fields | {"ignore_eos": True} | more


@dataclass(eq=False, slots=True)
class Stream:
    """A streamed answer. Times are from its client's clock.

    Attributes:
      asked_at: time at which its request was sent.
      times: arrival times of its events.
      pieces: received parts of its body.
      on_end: called once, when the answer or its connection has ended.
      head: status line and header fields; empty before they are received.
      is_whole: whether it is complete.
      is_kept: whether its connection can be reused.
    """

    asked_at: float = 0.0
    times: list[float] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    on_end: Callable[[Any], None] = lambda _: None
    head: bytes = b""
    is_whole: bool = False
    is_kept: bool = False
    _last: bytes = b""
    _missing: int | None = None
    _is_chunked: bool = False

    def take(self, data: bytes, now: float) -> None:
        """Process received bytes."""
        if not self.head:
            head, mark, data = (self._last + data).partition(b"\r\n\r\n")
            self._last = b"" if mark else head
            if not mark:
                return
            self.head = head + b"\r\n"
            if length := LENGTH.search(self.head):
                self._missing = int(length[1])
            self._is_chunked = bool(CHUNKED.search(self.head))
            ends_by_itself = self._is_chunked or self._missing is not None
            self.is_kept = ends_by_itself and not CLOSED.search(self.head)
        whole = self._last + data
        self.note(data, whole.count(EVENT) - self._last.count(EVENT), now)
        self._last = whole[-KEPT_BYTES:]
        if self._missing is not None:
            self._missing -= len(data)
            self.is_whole = self._missing <= 0
        elif self._is_chunked:
            self.is_whole = whole.endswith(CHUNKS_END)
        else:
            self.is_whole = self.is_whole or DONE in whole

    def note(self, data: bytes, num_events: int, now: float) -> None:
        """Store a part of the body and the times of events that begin in it."""
        self.pieces.append(data)
        self.times += [now] * num_events

    def check(self) -> None:
        """Raise StreamBrokenError unless the answer is complete and has status 200."""
        if not self.is_whole or self.status != 200:
            said = (self.head + b"\r\n" + self.body)[:400].decode(errors="replace")
            raise StreamBrokenError(f"{'no answer' if self.is_whole else 'closed early'}: {said}")

    @property
    def status(self) -> int:
        """HTTP status; 0 without a head."""
        return int(self.head[9:12] or 0)

    @property
    def body(self) -> bytes:
        """The body received so far, including chunk sizes."""
        return b"".join(self.pieces)

    @property
    def content(self) -> bytes:
        """The body received so far, without chunk sizes."""
        if not self._is_chunked:
            return self.body
        body, at, parts = self.body, 0, []
        while (mark := body.find(b"\r\n", at)) >= 0:
            begin, size = mark + 2, int(body[at:mark], 16)
            parts.append(body[begin : begin + size])
            at = begin + size + 2
        return b"".join(parts)

    @property
    def ttft_s(self) -> float | None:
        """Time from the request to the first event."""
        return self.times[0] - self.asked_at if self.times else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between consecutive events."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def num_tokens(self) -> int:
        """Completion tokens in the answer's usage."""
        return int(used[1]) if (used := USED.search(self.body)) else 0

    @property
    def code(self) -> str:
        """Error code of the answer."""
        return code[1].decode() if (code := CODE.search(self.body)) else ""

    @property
    def retry_after_s(self) -> float | None:
        """Seconds to wait before a retry, from the answer."""
        return float(told[1]) if (told := RETRY_AFTER.search(self.head)) else None

    def events(self) -> Iterable[dict[str, Any]]:
        """Yield the events of a complete stream."""
        for line in self.body.split(b"\n"):
            if line.startswith(EVENT):
                yield json.loads(line.removeprefix(b"data: "))


class Clients:
    """Clients of one server, with one connection per concurrent answer.

    Args:
      url: address of the server.
      clock: clock of all times.
      make: class of the answers.

    Attributes:
      opened: connections opened by `ask`.
    """

    def __init__(
        self,
        url: str,
        clock: Callable[[], float] = time.monotonic,
        make: type[Stream] = Stream,
    ) -> None:
        self.opened = 0
        self._address = (urlsplit(url).hostname, urlsplit(url).port)
        self._clock = clock
        self._make = make
        self._selector = selectors.DefaultSelector()
        self._open: dict[Stream, socket.socket] = {}
        self._idle: list[socket.socket] = []
        self._keeps = False

    def begin(self, request: bytes, on_end: Callable[[Any], None] = Stream.check) -> Any:  # noqa: ANN401 (of `make`)
        """Send a request on a new connection. `read` receives the answer."""
        connection = socket.create_connection(self._address, TIMEOUT_S)
        return self._send(connection, request, self._make(on_end=on_end))

    def read(self, timeout_s: float) -> None:
        """Wait for data and read it, unless the timeout passes."""
        for key, _ in self._selector.select(timeout_s):
            stream: Stream = key.data
            try:
                data = self._open[stream].recv(RECEIVE_BYTES)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                data = b""
            if data:
                stream.take(data, self._clock())
            if stream.is_whole or not data:
                self.leave(stream)
                stream.on_end(stream)

    def read_until(self, moment: float, is_enough: Callable[[], bool] = lambda: False) -> bool:
        """Read until a condition holds. Return False if it does not by `moment`."""
        while not is_enough():
            remaining_s = moment - self._clock()
            if remaining_s <= 0:
                return False
            self.read(remaining_s)
        return True

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Self]:
        """Read for tasks that call `ask` while the context is active, and close all at its end."""
        self._keeps = True
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_reading)
                yield self
                nursery.cancel_scope.cancel()
        finally:
            self.close()

    async def ask(self, request: bytes, into: Stream | None = None) -> Stream:
        """Send a request and return its complete answer, which may be an error.

        Args:
          request: head and body.
          into: stream that receives the answer; None for a new one.

        Raises:
          StreamBrokenError: connecting failed, or the connection broke.
          trio.TooSlowError: the timeout passed.
        """
        is_over = trio.Event()
        stream = self._make() if into is None else into
        stream.on_end = lambda _: is_over.set()
        with trio.fail_after(TIMEOUT_S):
            connection = self._idle.pop() if self._idle else await self._connected()
            self._send(connection, request, stream)
            try:
                await is_over.wait()
            finally:
                self.leave(stream)
        if not stream.is_whole:
            stream.check()
        return stream

    def leave(self, stream: Stream) -> None:
        """Stop reading an answer. Idempotent."""
        if (connection := self._open.pop(stream, None)) is not None:
            self._selector.unregister(connection)
            if self._keeps and stream.is_whole and stream.is_kept:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Stop reading all answers."""
        for stream in tuple(self._open):
            self.leave(stream)
        while self._idle:
            self._idle.pop().close()
        self._selector.close()

    async def _connected(self) -> socket.socket:
        self.opened += 1
        with trio.socket.socket() as raw:
            try:
                await raw.connect(self._address)
            except OSError as error:
                raise StreamBrokenError(f"cannot connect: {error}") from error
            return socket.socket(fileno=raw.detach())

    def _send(self, connection: socket.socket, request: bytes, stream: Stream) -> Stream:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(TIMEOUT_S)
        stream.asked_at = self._clock()
        try:
            connection.sendall(request)
        except OSError as error:
            connection.close()
            raise StreamBrokenError(f"the request could not be sent: {error}") from error
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, stream)
        self._open[stream] = connection
        return stream

    async def _keep_reading(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._selector)
            self.read(0.0)
