"""Streams over HTTP with next to no parsing: the clients share the machine with what they measure.

Speaks /v1/completions over connections that are kept and used again. Times first bytes of events
and ends; knows no schedule and no product.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import trio

EVENT: Final = b"data: {"
END: Final = b"0\r\n\r\n"
USED: Final = re.compile(rb'"completion_tokens": ?(\d+)')
LENGTH: Final = re.compile(rb"\r\ncontent-length: ?(\d+)\r\n", re.IGNORECASE)
RETRY_AFTER: Final = re.compile(rb"\r\nretry-after: ?([\d.]+)\r\n", re.IGNORECASE)
CODE: Final = re.compile(rb'"code": ?"(\w+)"')
KEPT_BYTES: Final = 2048
"""Of the end of a stream: what it used stands there."""
RECEIVE_BYTES: Final = 64 * 1024


class BrokenAnswerError(Exception):
    """A connection ended in the middle of an answer."""


@dataclass(slots=True)
class Answer:
    """One answer.

    Attributes:
      status: of HTTP.
      first_at: when its first event came, on Trio's clock; None without one.
      tokens: that it says it used.
      code: of an error.
      retry_after_s: when to come again, as it says.
    """

    status: int = 0
    first_at: float | None = None
    tokens: int = 0
    code: str = ""
    retry_after_s: float | None = None


@dataclass
class Asker:
    """Asks one server, over as many connections as there are answers at once.

    Attributes:
      port: on loopback.
      opened: connections.
    """

    port: int
    opened: int = 0
    _idle: list[trio.SocketStream] = field(default_factory=list)

    async def ask(self, request: bytes) -> Answer:
        """Send a request and read the whole answer.

        Raises:
          BrokenAnswerError: the connection ended.
          OSError: there is none to be had.
        """
        stream = self._idle.pop() if self._idle else None
        if stream is None:
            stream = await trio.open_tcp_stream("127.0.0.1", self.port)
            self.opened += 1
        is_whole = False
        try:
            await stream.send_all(request)
            answer = await _read(stream)
            is_whole = True
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise BrokenAnswerError(str(error)) from error
        finally:
            if is_whole:
                self._idle.append(stream)
            else:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                    await trio.aclose_forcefully(stream)
        return answer

    async def close(self) -> None:
        """Close what is kept."""
        while self._idle:
            with suppress(trio.BrokenResourceError):
                await self._idle.pop().aclose()


def request_bytes(port: int, fields: dict[str, object], headers: dict[str, str]) -> bytes:
    """Return a POST of a completion."""
    body = json.dumps(fields).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n{more}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _read(stream: trio.SocketStream) -> Answer:
    answer = Answer()
    seen = b""
    while b"\r\n\r\n" not in seen:
        seen += await _more(stream)
    head, _, body = seen.partition(b"\r\n\r\n")
    head += b"\r\n"
    answer.status = int(head[9:12])
    length = LENGTH.search(head)
    if length is not None:
        while len(body) < int(length[1]):
            body += await _more(stream)
    else:
        body = await _read_events(stream, answer, body)
    _note(answer, head, body)
    return answer


async def _read_events(stream: trio.SocketStream, answer: Answer, body: bytes) -> bytes:
    """Read a chunked body to its end; return the end of it."""
    while True:
        if answer.first_at is None and EVENT in body:
            answer.first_at = trio.current_time()
        if body.endswith(END):
            return body
        body = body[-KEPT_BYTES:] + await _more(stream)


def _note(answer: Answer, head: bytes, body: bytes) -> None:
    if (used := USED.search(body)) is not None:
        answer.tokens = int(used[1])
    if (code := CODE.search(body)) is not None:
        answer.code = code[1].decode()
    if (retry_after := RETRY_AFTER.search(head)) is not None:
        answer.retry_after_s = float(retry_after[1])


async def _more(stream: trio.SocketStream) -> bytes:
    data = bytes(await stream.receive_some(RECEIVE_BYTES))
    if not data:
        raise BrokenAnswerError("the server closed the connection")
    return data
