"""The body of a streamed answer. Knows what comes in which order, and when silence needs a comment.

It owns nothing: it reads generations that belong to the request, so a client may drop it at any
point. One write carries all that is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from quart.wrappers.response import ResponseBody

from ..generation import Delta, Failed, Finished
from .chunks import DONE, KEEP_ALIVE, error_event, total_usage

if TYPE_CHECKING:
    from types import TracebackType

    from ..generation import Event, Usage
    from .choices import Choices
    from .chunks import ChunkWriter


class EventStreamBody(ResponseBody):
    """Reads choices, writes Server-Sent Events.

    Args:
      choices: what to read.
      writer: the form of the chunks.
      count: number of choices.
      per_prompt: choices that share one prompt.
      keep_alive_s: silence after which a comment is sent, which also finds out whether the client
        is still there.
    """

    def __init__(
        self,
        choices: Choices,
        writer: ChunkWriter,
        *,
        count: int,
        per_prompt: int,
        keep_alive_s: float,
    ) -> None:
        self._choices = choices
        self._writer = writer
        self._per_prompt = per_prompt
        self._keep_alive_s = keep_alive_s
        self._usages: list[Usage | None] = [None] * count
        self._opening = b"".join(writer.first(index) for index in range(count))
        self._is_over = False

    async def __aenter__(self) -> EventStreamBody:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Nothing to give back."""

    def __aiter__(self) -> EventStreamBody:
        return self

    async def __anext__(self) -> bytes:
        """Return the next write."""
        if self._opening:
            opening, self._opening = self._opening, b""
            return opening
        # Tokens that show nothing, such as special ones, are silence too.
        silent_until = trio.current_time() + self._keep_alive_s
        while not self._is_over:
            taken = await self._choices.next_events(silent_until)
            if not taken:
                return KEEP_ALIVE
            written = bytearray()
            for index, events in taken:
                for event in events:
                    written += self._write(index, event)
            if not self._is_over and self._choices.are_over:
                written += self._ending()
            if written:
                return bytes(written)
        raise StopAsyncIteration

    def _write(self, index: int, event: Event) -> bytes:
        if self._is_over:
            return b""
        match event:
            case Delta():
                is_shown = self._writer.envelope.is_worth_a_chunk(event)
                return self._writer.delta(index, event) if is_shown else b""
            case Finished():
                self._usages[index] = event.usage
                return self._writer.finish(index, event.reason)
            case Failed():
                # One error ends the whole stream; the other choices end with the request.
                self._is_over = True
                return error_event(event.error)

    def _ending(self) -> bytes:
        self._is_over = True
        if not self._writer.envelope.with_usage:
            return DONE
        usages = [usage for usage in self._usages if usage is not None]
        return self._writer.envelope.usage(total_usage(usages, self._per_prompt)) + DONE
