"""The body of a streamed answer. Knows what comes in which order, and when silence needs a comment.

It owns nothing: it reads generations that belong to the request, so a client may drop it at any
point. One write carries all that is there. Between two writes of the usual kind it listens, and
what comes meanwhile goes the short way; its task sleeps until that is blocked, or until the answer
ends, or until there was silence for too long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from ..generation import Failed
from .listening import listen_until
from .stream_body import StreamBody

if TYPE_CHECKING:
    from ..generation import Event
    from .choices import Choices
    from .shortcut import Shortcut


class StreamForm(Protocol):
    """What the stream of one endpoint looks like, in bytes. Pure; one per stream."""

    @property
    def keep_alive(self) -> bytes:
        """What is sent into a silence; clients skip it."""
        ...

    def begin(self) -> bytes:
        """Return what comes before all else; may be empty."""
        ...

    def write(self, index: int, event: Event) -> bytes:
        """Return what an event of a choice looks like; empty if it shows nothing.

        A Failed is the end of the whole stream, in this API's form.
        """
        ...

    def end(self) -> bytes:
        """Return what follows the good ends of all choices."""
        ...


class EventStreamBody(StreamBody):
    """Reads choices, writes Server-Sent Events.

    Args:
      choices: what to read.
      form: what is written.
      shortcut: of the connection.
      keep_alive_s: silence after which something is sent that says nothing, which also finds out
        whether the client is still there.
    """

    def __init__(
        self, choices: Choices, form: StreamForm, shortcut: Shortcut, *, keep_alive_s: float
    ) -> None:
        self._choices = choices
        self._form = form
        self._shortcut = shortcut
        self._keep_alive_s = keep_alive_s
        self._opening = form.begin()
        self._is_over = False
        self._shown_at = trio.current_time()
        self._unsent = b""

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
                return self._form.keep_alive
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
        parts = []
        for index, events in self._choices.take_now():
            for event in events:
                if self._is_over:
                    break
                parts.append(self._form.write(index, event))
                # One error ends the whole stream; the other choices end with the request.
                self._is_over = isinstance(event, Failed)
        if not self._is_over and self._choices.are_over:
            self._is_over = True
            parts.append(self._form.end())
        return b"".join(parts)
