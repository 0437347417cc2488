"""Clients of the benchmark of the front: many streams, read by one loop that does little else."""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
