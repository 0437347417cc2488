"""Streams over HTTP on raw sockets: a time per event, next to no CPU.

The clients share the machine with what is measured, so nothing is parsed: events of a stream are
counted by the mark that each begins with.
"""

from __future__ import annotations

import json
import selectors
import socket
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

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
