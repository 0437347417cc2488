"""Streams over HTTP on raw sockets: a time per event or token, next to no CPU.

The clients share the machine with what is measured, so next to nothing is parsed: events are
counted by the mark that each begins with, tokens by the spaces in a chunk's content.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from array import array
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Sequence


FIRST_WORD, LAST_WORD = 4_200, 16_000
"""Token ids that are whole words in every model of `bench.model`, behind the demo's vocabulary: a
stream of one of them has an event per token."""
SAID: Final = 5_000
"""What every stream says, whatever the random weights would like to."""
MARK: Final = b"data: {"
RECEIVE_BYTES: Final = 256 * 1024
TIMEOUT_S: Final = 30.0


class StreamBrokenError(Exception):
    """A stream ended that should not have, or never began."""


@dataclass(eq=False)
class Stream:
    """One answer.

    Attributes:
      asked_at: when its request was sent.
      times: of its events.
      on_end: called when it has ended by itself.
    """

    connection: socket.socket
    asked_at: float
    on_end: Callable[[], None] | None = None
    times: list[float] = field(default_factory=list)
    rest: bytes = b""

    @property
    def ttft_s(self) -> float | None:
        """From the request to its first event."""
        return self.times[0] - self.asked_at if self.times else None

    def take(self, data: bytes, now: float) -> None:
        """Count the events that begin in some bytes."""
        whole = self.rest + data
        if not self.times and not whole.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")):
            if len(whole) >= len(b"HTTP/1.1 200"):
                raise StreamBrokenError(whole[:400].decode(errors="replace"))
            self.rest = whole
            return
        self.times += [now] * whole.count(MARK)
        keep = len(MARK) - 1
        self.rest = whole[-keep:] if self.times else whole


class Streams:
    """All streams to one server.

    Args:
      host: where it listens.
      port: of it.
      model: what it calls the model.
    """

    def __init__(self, host: str, port: int, model: str) -> None:
        self._address = (host, port)
        self._model = model
        self._selector = selectors.DefaultSelector()
        self._open: set[Stream] = set()

    def ask(
        self, prompt: Sequence[int], max_tokens: int, on_end: Callable[[], None] | None = None
    ) -> Stream:
        """Begin an answer of so many tokens."""
        body = json.dumps(
            {
                "model": self._model,
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
                "logit_bias": {str(SAID): 100},
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._address[0]}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        connection = socket.create_connection(self._address, timeout=TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = Stream(connection, perf_counter(), on_end)
        connection.sendall(head.encode() + body)
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, stream)
        self._open.add(stream)
        return stream

    def read_until(self, when: float) -> None:
        """Read whatever comes until a moment.

        Raises:
          StreamBrokenError: an answer is an error.
        """
        while (remaining_s := when - perf_counter()) > 0:
            self.read(remaining_s)

    def read(self, timeout_s: float) -> None:
        """Read what comes next, if it comes in time."""
        for key, _ in self._selector.select(timeout_s):
            stream: Stream = key.data
            data = stream.connection.recv(RECEIVE_BYTES)
            now = perf_counter()
            if data:
                stream.take(data, now)
                if b"data: [DONE]" in data:
                    self.leave(stream)
                    if stream.on_end is not None:
                        stream.on_end()
            elif stream.times:
                self.leave(stream)
            else:
                raise StreamBrokenError("the server closed the connection without an answer")

    def leave(self, stream: Stream) -> None:
        """Close a stream, over or not."""
        if stream in self._open:
            self._open.remove(stream)
            self._selector.unregister(stream.connection)
            stream.connection.close()

    def close(self) -> None:
        """Leave them all."""
        for stream in tuple(self._open):
            self.leave(stream)
        self._selector.close()


def prompt_of(numbers: random.Random, num_tokens: int) -> list[int]:
    """Return a random prompt: no two have a common beginning that a cache could use."""
    return [numbers.randint(FIRST_WORD, LAST_WORD) for _ in range(num_tokens)]


CONTENT: Final = re.compile(rb'"content":\s*"([^"]*)"')
"""Of a chunk, whichever library wrote it; the words of the benchmark need no escapes."""
READ_BYTES: Final = 65_536
CONNECT_TIMEOUT_S: Final = 20.0
OPENING_PAUSE_S: Final = 0.002
"""Between two new connections, in which those that are there are read."""


def chat_request(seed: int, max_tokens: int, *, n: int = 1, key: str = "") -> bytes:
    """Return one request, head and body."""
    body = chat_body(seed, max_tokens, n)
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *([f"Authorization: Bearer {key}"] if key else []),
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def chat_body(seed: int, max_tokens: int, n: int = 1) -> bytes:
    """Return the body of one request."""
    return json.dumps(
        {
            "messages": [{"role": "user", "content": f"Tell me story {seed}."}],
            "stream": True,
            "seed": seed,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "n": n,
        }
    ).encode()


@dataclass(slots=True)
class ClientStream:
    """One answer that is being read.

    Attributes:
      seed: its number.
      raw: its connection.
      arrivals: when each token came, by the system's monotonic clock.
      num_events: chunks with any text.
      unread: the beginning of an event whose end is still to come.
    """

    seed: int
    raw: socket.socket
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    num_events: int = 0
    unread: bytes = b""

    def take(self, data: bytes, now: float) -> None:
        """Count the tokens in what came."""
        whole, mark, rest = (self.unread + data).rpartition(b"\n\n")
        self.unread = rest
        if mark:
            for text in CONTENT.findall(whole):
                count = text.count(b" ")
                self.num_events += count > 0
                for _ in range(count):
                    self.arrivals.append(now)


class Clients:
    """Streams of one server.

    Args:
      port: of the server, on loopback.
    """

    def __init__(self, port: int) -> None:
        self.streams: list[ClientStream] = []
        self.broken = 0
        self._port = port
        self._selector = selectors.DefaultSelector()

    @property
    def num_tokens(self) -> int:
        """Of all streams so far."""
        return sum(len(stream.arrivals) for stream in self.streams)

    @property
    def num_events(self) -> int:
        """Chunks of all streams so far."""
        return sum(stream.num_events for stream in self.streams)

    def open(self, seeds: Iterable[int], max_tokens: int) -> None:
        """Begin streams, while those that are there are read."""
        for seed in seeds:
            raw = socket.create_connection(("127.0.0.1", self._port), CONNECT_TIMEOUT_S)
            raw.sendall(chat_request(seed, max_tokens))
            raw.setblocking(False)
            stream = ClientStream(seed, raw)
            self.streams.append(stream)
            self._selector.register(raw, selectors.EVENT_READ, stream)
            self.read_for(OPENING_PAUSE_S)

    def read_for(self, seconds: float) -> None:
        """Read whatever comes for so long."""
        until = time.monotonic() + seconds
        self.read_until(lambda: False, until)

    def read_until(self, is_enough: Callable[[], bool], deadline: float) -> bool:
        """Read until a condition holds, which is asked after each batch; False at the deadline."""
        while not is_enough():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            for key, _ in self._selector.select(remaining):
                self._read(key.data)
        return True

    def close(self) -> None:
        """Leave all streams."""
        for stream in self.streams:
            stream.raw.close()
        self._selector.close()

    def _read(self, stream: ClientStream) -> None:
        try:
            data = stream.raw.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if data:
            stream.take(data, time.monotonic())
        else:
            self.broken += 1
            self._selector.unregister(stream.raw)
