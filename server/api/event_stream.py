"""The body of a streamed answer. Knows what comes in which order, and when silence needs a comment.

It owns nothing: it reads generations that belong to the request, so a client may drop it at any
point. One write carries all that is there. Between two writes of the usual kind it listens, and
what comes meanwhile goes the short way; its task sleeps until that is blocked, or until the answer
ends, or until there was silence for too long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from quart.wrappers.response import ResponseBody

from ..generation import Delta, Failed, Finished
from .chunks import DONE, KEEP_ALIVE, error_event, total_usage
from .listening import listen_until

if TYPE_CHECKING:
    from types import TracebackType

    from ..generation import Event, Usage
    from .choices import Choices
    from .chunks import ChunkWriter
    from .shortcut import Shortcut


class EventStreamBody(ResponseBody):
    """Reads choices, writes Server-Sent Events.

    Args:
      choices: what to read.
      writer: the form of the chunks.
      shortcut: of the connection.
      count: number of choices.
      per_prompt: choices that share one prompt.
      keep_alive_s: silence after which a comment is sent, which also finds out whether the client
        is still there.
    """

    def __init__(
        self,
        choices: Choices,
        writer: ChunkWriter,
        shortcut: Shortcut,
        *,
        count: int,
        per_prompt: int,
        keep_alive_s: float,
    ) -> None:
        self._choices = choices
        self._writer = writer
        self._shortcut = shortcut
        self._per_prompt = per_prompt
        self._keep_alive_s = keep_alive_s
        self._usages: list[Usage | None] = [None] * count
        self._opening = b"".join(writer.first(index) for index in range(count))
        self._is_over = False
        self._shown_at = trio.current_time()
        self._unsent = b""

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
        """Return the next write that does not go the short way."""
        if self._opening:
            opening, self._opening = self._opening, b""
            return opening
        if self._is_over:
            raise StopAsyncIteration
        # Tokens that show nothing, such as special ones, are silence too.
        self._shown_at = trio.current_time()
        if written := self._take():
            await trio.lowlevel.checkpoint()
            return written
        while not await listen_until(self._choices.listen, self._is_blocked, self._silent_until):
            if trio.current_time() >= self._silent_until:
                return KEEP_ALIVE
        unsent, self._unsent = self._unsent, b""
        return unsent

    @property
    def _silent_until(self) -> float:
        return self._shown_at + self._keep_alive_s

    def _is_blocked(self) -> bool:
        """Send what there is the short way; return whether something is left for the usual one."""
        written = self._take()
        if not written:
            return False
        if not self._is_over and self._shortcut.try_send(written):
            self._shown_at = trio.current_time()
            return False
        self._unsent = written
        return True

    def _take(self) -> bytes:
        """Return as bytes what the choices have by now."""
        parts = [
            self._write(index, event)
            for index, events in self._choices.take_now()
            for event in events
        ]
        if not self._is_over and self._choices.are_over:
            parts.append(self._ending())
        return b"".join(parts)

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
