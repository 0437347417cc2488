"""Clients of a campaign: send requests, time each piece, and retry after broken connections."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import trio

from ..harness.http import WebSocket
from ..harness.streams import CHAT, Clients, Stream, StreamBrokenError, post
from .answers import READERS, Answer, AnswerReader, StreamFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .answers import Ask

ASK_TIMEOUT_S = 120.0
"""Timeout of one try. Far longer than any recovery, so a timeout means that a request was lost."""
RETRY_DELAY_S = 0.1
MAX_TRIES = 300
"""A server is back within seconds; refused connections for 30 s are a failure."""
MALFORMED = (ValueError, LookupError, TypeError)
"""Exceptions of readers if they cannot parse an answer."""


@dataclass(frozen=True, slots=True)
class Broken:
    """An attempt with a connection that ended before the answer.

    Attributes:
      at: time of detection.
      had_begun: whether the request had been sent.
      token_ids: tokens received before, if the surface returns them.
      text: text received before.
    """

    at: float
    had_begun: bool
    token_ids: tuple[int, ...]
    text: str


@dataclass(slots=True)
class Story:
    """Everything that happened to one request. Times are from Trio's clock.

    Attributes:
      ask: the request.
      sent_at: time of its last try.
      arrivals: times of text and tokens of its last try.
      broken: tries with a broken connection.
      answer: its whole answer, or None.
      failure: why it has no answer.
    """

    ask: Ask
    sent_at: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)
    answer: Answer | None = None
    failure: str | None = None

    @property
    def longest_silence_s(self) -> float:
        """The longest time without new text, including the wait for the first."""
        return max((b - a for a, b in pairwise([self.sent_at, *self.arrivals])), default=0.0)

    def was_alive_at(self, moment: float) -> bool:
        """Return whether it had been sent and was not fully answered."""
        return bool(self.arrivals) and self.sent_at <= moment <= self.arrivals[-1]


async def ask_all(
    url: str,
    asks: Sequence[Ask],
    clients: int,
    on_end: Callable[[Story], None],
    *,
    retries_broken: bool = False,
) -> list[Story]:
    """Send all requests with a fixed concurrency, and return their stories in order.

    Args:
      url: address of the server.
      asks: the requests.
      clients: number of concurrent clients, each with one request at a time.
      on_end: called with each story when it ends.
      retries_broken: whether a broken connection is tried again; else it is a failure.
    """
    stories = [Story(ask) for ask in asks]
    waiting = deque(stories)

    async def client() -> None:
        while waiting:
            story = waiting.popleft()
            await tell(url, story, retries_broken=retries_broken)
            on_end(story)

    async with trio.open_nursery() as nursery:
        for _ in range(clients):
            nursery.start_soon(client)
    return stories


async def tell(url: str, story: Story, *, retries_broken: bool) -> None:
    """Send a request, with retries after broken connections if allowed. Record the result."""
    for _ in range(MAX_TRIES if retries_broken else 1):
        reader: AnswerReader = READERS[story.ask.surface]()
        story.arrivals.clear()
        story.sent_at = 0.0
        try:
            with trio.fail_after(ASK_TIMEOUT_S):
                ask = _over_websocket if story.ask.surface == "ws" else _over_http
                await ask(url, story, reader)
        except StreamBrokenError as error:
            story.failure = f"connection broken: {error}"
            began = story.sent_at > 0
            now = trio.current_time()
            story.broken.append(Broken(now, began, tuple(reader.token_ids), reader.text))
            await trio.sleep(RETRY_DELAY_S)
            continue
        except trio.TooSlowError:
            story.failure = "no end in time"
        except StreamFailedError as error:
            story.failure = str(error)
        except MALFORMED as error:
            story.failure = f"cannot be parsed: {error!r}"
        else:
            story.answer = reader.answer
            story.failure = None if reader.answer else "ended without a terminal event"
        return


@dataclass(eq=False, slots=True)
class _Lines(Stream):
    """Splits an answer into lines. Chunk sizes are separate lines, and no event spans two chunks.

    Attributes:
      on_line: called with each line and its arrival time.
      error: error of the answer or its connection.
    """

    on_line: Callable[[bytes, float], None] = lambda *_: None
    error: Exception | None = None
    _unread: bytes = b""

    def note(self, data: bytes, num_events: int, now: float) -> None:
        """Take the complete lines."""
        Stream.note(self, data, num_events, now)
        *lines, self._unread = (self._unread + data).split(b"\n")
        try:
            for line in lines if self.error is None else ():
                self.on_line(line.rstrip(b"\r"), now)
        except (StreamFailedError, *MALFORMED) as error:
            self.error = error


async def _over_http(url: str, story: Story, reader: AnswerReader) -> None:
    def take(data: bytes, now: float) -> None:
        if reader.take(data):
            story.arrivals.append(now)

    answer = _Lines(on_line=take) if story.ask.surface == "sse" else _Lines()
    request = post(CHAT, story.ask.body, {"connection": "close"} | story.ask.headers)
    async with Clients(url, trio.current_time).reading() as clients:
        try:
            await clients.ask(request, answer)
        except StreamBrokenError as error:
            answer.error = answer.error or error
        finally:
            story.sent_at = answer.asked_at
    if answer.error is not None:
        raise answer.error
    if answer.status != 200:
        raise StreamFailedError(f"status {answer.status}", answer.content.decode(errors="replace"))
    if story.ask.surface == "plain":
        take(answer.content, trio.current_time())


async def _over_websocket(url: str, story: Story, reader: AnswerReader) -> None:
    async with WebSocket(url) as socket:
        await socket.open("/v1/responses", story.ask.headers)
        story.sent_at = trio.current_time()
        await socket.send_text(json.dumps(story.ask.body))
        while reader.answer is None:
            if reader.take(await socket.next_message()):
                story.arrivals.append(trio.current_time())
