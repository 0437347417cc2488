"""Response bodies that stream events, and the base class of serializers.

A task switch, the application's send and the protocol stack cost several times the write itself. So
pieces are written directly to the socket if that needs no waiting (`ClientChannel.try_send`), and
through the application otherwise.
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
"""A comment in Server-Sent Events."""


class StreamBody(ResponseBody):
    """Yields one write after another until StopAsyncIteration."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Do nothing: there is nothing to release."""

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> bytes:
        """Return the next bytes to write."""


@dataclass(slots=True)
class Answer:
    """One choice, complete once it has its end.

    Attributes:
      texts: the texts of its tokens.
      token_ids: the ids of its tokens.
      logprobs: the logprobs of its tokens, if requested.
      scored: per token, the serialized form of its alternatives, which are then dropped.
      end: why it ended.
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
        """Its end; use only after it has ended."""
        assert self.end is not None
        return self.end


def add_event(answers: Sequence[Answer], index: int, event: Event) -> None:
    """Add an event to its choice's answer.

    Raises:
      RequestError: the choice failed.
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
    """Writes one answer in an endpoint's format, as frames of bytes. Pure; one per answer.

    Attributes:
      keep_alive: sent during silence; clients skip it.
      is_stopped: whether the client asked for the end, so that a Failed is not an error.
    """

    keep_alive: bytes = KEEP_ALIVE
    is_stopped = False

    def begin(self) -> list[bytes]:
        """Return the frames before everything else."""
        return []

    @abstractmethod
    def event(self, index: int, event: Event) -> list[bytes]:
        """Return the frames of an event; for a Failed, the end of the answer."""

    def end(self) -> list[bytes]:
        """Return the frames after all choices have ended normally."""
        return []


class WholeAnswer(Serializer):
    """An answer that is sent as a whole at its end.

    Args:
      count: number of choices.
      document: serializes the answers.
      score: serializes a token's alternatives as they arrive, because doing so for thousands of
        tokens at the end would block all streams; None to leave them unchanged.
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
        """Add an event; failures show nothing."""
        if isinstance(event, Delta) and self._score is not None:
            scored = [msgspec.Raw(msgspec.json.encode(self._score(t))) for t in event.logprobs]
            self._answers[index].scored += scored
            # Garbage collection would traverse a million stored alternatives each time.
            kept = tuple(replace(token, top=()) for token in event.logprobs)
            event = msgspec.structs.replace(event, logprobs=kept)
        if not isinstance(event, Failed):
            add_event(self._answers, index, event)
        return []

    def end(self) -> list[bytes]:
        """Return the whole answer."""
        return [self._document(self._answers)]


class EventStreamBody(StreamBody):
    """Reads a stream and writes the response body.

    Args:
      stream: the stream to read.
      serializer: the endpoint's serializer.
      connection: the client's connection.
      keep_alive_s: silence after which a keep-alive is sent, which also detects a disconnected
        client.
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
        """Return the next bytes that cannot be written directly."""
        if self._opening:
            opening, self._opening = self._opening, b""
            return opening
        if self._is_over:
            raise StopAsyncIteration
        # Tokens without visible text, such as special tokens, count as silence.
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
        """Write events directly; return the bytes that are left for the application, or None."""
        frames: list[bytes] = []
        for index, event in events:
            frames += self._serializer.event(index, event)
            if isinstance(event, Failed):
                # An error ends the whole answer; the other choices end with the request.
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
