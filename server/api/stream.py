"""Streams of events as the bodies of responses.

A task's turn, the application's send and the protocol's machinery cost several times what the write
itself does. So a piece of an answer is written straight into the kernel where that needs no waiting
(`ClientChannel.try_send`), and goes the usual way where it fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Self

import msgspec
import trio
from quart.wrappers.response import ResponseBody

from ..contract.generation import Delta, Event, Events, Failed, Finished, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from ..contract.output_stream import OutputStream
    from .request_scope import ClientConnection


KEEP_ALIVE: Final = b": keep-alive\n\n"
"""A comment of Server-Sent Events."""


class StreamBody(ResponseBody):
    """Gives one write after the other, until StopAsyncIteration."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Nothing to give back."""

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> bytes:
        """Return the next write."""


@dataclass(slots=True)
class Answer:
    """One choice, complete once it has its end.

    Attributes:
      texts: of its tokens.
      token_ids: of its tokens.
      logprobs: of its tokens, if they were asked for.
      scored: of each of these what its answer writes of its alternatives, which are then dropped.
      end: why it has ended.
    """

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scored: list[msgspec.Raw] = field(default_factory=list)
    end: Finished | None = None

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.texts)

    @property
    def finished(self) -> Finished:
        """Its end; only asked for once it is there."""
        assert self.end is not None
        return self.end


def add_event(answers: Sequence[Answer], index: int, event: Event) -> None:
    """Add an event to the answer of its choice.

    Raises:
      RequestError: it is the bad end.
    """
    answer = answers[index]
    match event:
        case Delta():
            answer.texts.append(event.text)
            answer.token_ids.extend(event.token_ids)
            answer.logprobs.extend(event.logprobs)
        case Finished():
            answer.end = event
        case Failed():
            raise event.error


class Serializer(ABC):
    """Writes one answer in the words of one endpoint, as frames of bytes. Pure; one per answer.

    Attributes:
      keep_alive: what is sent into a silence; clients skip it.
      is_stopped: the client asked for the end, so that a Failed is no failure.
    """

    keep_alive: bytes = KEEP_ALIVE
    is_stopped = False

    def begin(self) -> list[bytes]:
        """Return what comes before all else."""
        return []

    @abstractmethod
    def event(self, index: int, event: Event) -> list[bytes]:
        """Return what an event of a choice looks like; of a Failed, the end of the answer."""

    def end(self) -> list[bytes]:
        """Return what follows the good ends of all choices."""
        return []


class WholeAnswer(Serializer):
    """An answer that is sent in one piece, once all of it is there.

    Args:
      count: number of choices.
      document: writes it.
      score: returns what it writes of a token's alternatives, as that comes: those of thousands of
        tokens at the end would hold up all streams; None to leave them as they are.
    """

    def __init__(
        self,
        count: int,
        document: Callable[[list[Answer]], bytes],
        score: Callable[[TokenLogprob], object] | None = None,
    ) -> None:
        self._answers = [Answer() for _ in range(count)]
        self._document = document
        self._score = score

    def event(self, index: int, event: Event) -> list[bytes]:
        """Take an event; of a failure nothing is shown."""
        if isinstance(event, Delta) and self._score is not None:
            scored = [msgspec.Raw(msgspec.json.encode(self._score(t))) for t in event.logprobs]
            self._answers[index].scored += scored
            # A million alternatives that are kept would be gone through at each garbage collection.
            kept = tuple(replace(token, top=()) for token in event.logprobs)
            event = msgspec.structs.replace(event, logprobs=kept)
        if not isinstance(event, Failed):
            add_event(self._answers, index, event)
        return []

    def end(self) -> list[bytes]:
        """Return the whole."""
        return [self._document(self._answers)]


class EventStreamBody(StreamBody):
    """Reads a stream, writes the body of a response.

    Args:
      stream: what to read.
      serializer: of the endpoint.
      connection: of the client.
      keep_alive_s: silence after which something is sent that says nothing, which also finds out
        whether the client is still there.
    """

    def __init__(
        self,
        stream: OutputStream,
        serializer: Serializer,
        connection: ClientConnection,
        *,
        keep_alive_s: float,
    ) -> None:
        self._stream = stream
        self._serializer = serializer
        self._connection = connection
        self._keep_alive_s = keep_alive_s
        self._opening = b"".join(serializer.begin())
        self._is_over = False
        self._shown_at = trio.current_time()

    async def __anext__(self) -> bytes:
        """Return the next write that does not go the short way."""
        if self._opening:
            opening, self._opening = self._opening, b""
            return opening
        if self._is_over:
            raise StopAsyncIteration
        # Tokens that show nothing, such as special ones, are silence too.
        self._shown_at = trio.current_time()
        while True:
            written = await self._stream.pump(self._write, self._silent_until)
            if written:
                return written
            if self._is_over:
                raise StopAsyncIteration
            if trio.current_time() >= self._silent_until:
                return self._serializer.keep_alive

    @property
    def _silent_until(self) -> float:
        return self._shown_at + self._keep_alive_s

    def _write(self, events: Events) -> bytes | None:
        """Send events the short way; return what is left for the usual one, None for nothing."""
        frames: list[bytes] = []
        for index, event in events:
            frames += self._serializer.event(index, event)
            if isinstance(event, Failed):
                # One error ends the whole answer; the other choices end with the request.
                self._is_over = True
                break
        else:
            if self._stream.is_over:
                self._is_over = True
                frames += self._serializer.end()
        written = b"".join(frames)
        if self._is_over:
            return written
        if not written:
            return None
        if self._connection.channel.try_send(written):
            self._shown_at = self._stream.delivered_at
            return None
        return written
