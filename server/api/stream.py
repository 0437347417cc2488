"""The short way from a token to its client: straight into the kernel, if that needs no waiting.

A task's turn, the application's send and the protocol's machinery together cost several times what
the write itself does. So whoever has a piece of an answer tries this first, and goes the usual way
where it fails. Knows what may be said of a try; the connection (server/edge) does it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

import trio
from quart.wrappers.response import ResponseBody

from ..contract.generation import Delta, Failed, Finished

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    Listen = Callable[[Callable[[], None] | None], None]
    from collections.abc import Callable, Sequence

    from ..contract.generation import Event, Generation, TokenLogprob


class Shortcut(Protocol):
    """A connection, between two pieces of an answer. Neither waits nor raises."""

    def try_send(self, data: bytes) -> bool:
        """Send a piece of the body of a response, or one text message of a WebSocket, in UTF-8.

        Returns:
          False if nothing was done: there is no room, something else is being written, or this is
          no moment for it. Then it has to go the usual way, which waits.
        """
        ...


class NoShortcut:
    """The connection of an application that something else serves."""

    def try_send(self, data: bytes) -> bool:
        """Take nothing."""
        return False


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


async def listen_until(
    listen: Listen, is_enough: Callable[[], bool], deadline: float = math.inf
) -> bool:
    """Listen until there is reason to stop.

    Args:
      listen: of a generation, or of several.
      is_enough: called whenever there are events; takes them, and says whether to stop.
      deadline: on trio's clock.

    Returns:
      Whether it was enough; False if the deadline came first.

    Raises:
      Exception: whatever `is_enough` raised.
    """
    stopped = trio.Event()
    error: Exception | None = None

    def on_events() -> None:
        nonlocal error
        try:
            if not is_enough():
                return
        except Exception as raised:  # noqa: BLE001 (raised below, in the reader's own task)
            error = raised
        listen(None)
        stopped.set()

    listen(on_events)
    try:
        with trio.move_on_at(deadline):
            await stopped.wait()
    finally:
        listen(None)
    if error is not None:
        raise error
    return stopped.is_set()


class Choices:
    """Several generations, numbered as the answer numbers them.

    Args:
      generations: one per choice.
    """

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._open = dict(enumerate(generations))

    @property
    def are_over(self) -> bool:
        """Whether every choice has had its last event."""
        return not self._open

    def take_now(self) -> list[tuple[int, Sequence[Event]]]:
        """Return (index, events) of every choice that has events, without waiting."""
        taken = []
        for index, generation in tuple(self._open.items()):
            events = generation.take_now()
            if events:
                taken.append((index, events))
                if not isinstance(events[-1], Delta):
                    del self._open[index]
                    generation.listen(None)  # or it would hold its listener, and that one this
        return taken

    def listen(self, on_events: Callable[[], None] | None) -> None:
        """Have this called whenever any choice has events (see Generation.listen); None to stop."""
        for generation in self._open.values():
            generation.listen(on_events)

    async def next_events(self) -> Sequence[tuple[int, Sequence[Event]]]:
        """Wait until any choice has events; return those of all that have."""
        if taken := self.take_now():
            await trio.lowlevel.checkpoint()
            return taken
        await listen_until(self.listen, lambda: True)
        return self.take_now()


@dataclass(slots=True)
class Answer:
    """One choice, complete once it has its end."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
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


async def collect(choices: Choices, count: int) -> list[Answer]:
    """Read all choices to their ends.

    Raises:
      RequestError: one of them failed.
    """
    answers = [Answer() for _ in range(count)]
    while not choices.are_over:
        for index, events in await choices.next_events():
            for event in events:
                add_event(answers, index, event)
    return answers


class WholeScript:
    """An answer that is said in one piece, once all of it is there.

    Args:
      count: number of choices.
      document: writes it.
    """

    def __init__(self, count: int, document: Callable[[list[Answer]], bytes]) -> None:
        self._answers = [Answer() for _ in range(count)]
        self._document = document

    def begin(self) -> list[bytes]:
        """Return nothing."""
        return []

    def write(self, index: int, event: Event, *, is_stopped: bool) -> list[bytes]:
        """Take an event; of a failure nothing is shown."""
        del is_stopped  # over HTTP a client stops by leaving
        if not isinstance(event, Failed):
            add_event(self._answers, index, event)
        return []

    def end(self) -> list[bytes]:
        """Return the whole."""
        return [self._document(self._answers)]


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
