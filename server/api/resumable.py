"""An answer that belongs to no connection: it is written down as it comes, and read from there.

Its client asked for that. It may leave and come back to any place, and several may read at once;
all of them get the same bytes. Knows generations and readers; knows no HTTP. It runs ahead of its
fastest reader by a bound, then its tokens wait in the fleet as those of every client do, and what
is said there of clients that do not read holds here too. Nobody waits here: it is called when there
are events, like every listener.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import structlog
import trio

from triolet.errors import RequestError, server_error

from ..generation import CancelReason, Failed
from .transcript import Transcript

if TYPE_CHECKING:
    from triolet.config_resume import ResumeConfig

    from ..generation import Event, Generation
    from .choices import Choices

log = structlog.get_logger(__name__)


class Script(Protocol):
    """What an answer looks like, frame by frame. Pure."""

    def begin(self) -> list[bytes]:
        """Return what comes before all else."""
        ...

    def write(self, index: int, event: Event, *, is_stopped: bool) -> list[bytes]:
        """Return what an event of a choice looks like; of a Failed, the end of the answer."""
        ...

    def end(self) -> list[bytes]:
        """Return what follows the good ends of all choices."""
        ...


class ResumableAnswer:
    """One answer.

    Args:
      script: what it looks like.
      fingerprint: of what was asked for.
      config: bounds.

    Attributes:
      script: as above.
      fingerprint: as above.
      transcript: what has been said so far.
      failure: what went wrong, once something has.
      alone_since: since when nobody reads it; None while somebody does.
      ended_at: when it ended; None while it runs.
    """

    def __init__(self, script: Script, fingerprint: bytes, config: ResumeConfig) -> None:
        self.script = script
        self.fingerprint = fingerprint
        self.transcript = Transcript()
        self.failure: RequestError | None = None
        self.alone_since: float | None = trio.current_time()
        self.ended_at: float | None = None
        self._config = config
        self._generations: list[Generation] = []
        self._choices: Choices | None = None
        self._readers: set[ResumingReader] = set()
        self._left_at = 0
        self._is_listening = self._is_stopped = self._is_given_up = False
        self._changed = trio.Event()

    def hold(self, generation: Generation) -> None:
        """Take a generation, which ends when this answer is given up."""
        self._generations.append(generation)

    def start(self, choices: Choices) -> None:
        """Write down what comes of what was begun."""
        self._choices = choices
        self._say(self.script.begin())
        self.go_on()

    def read_from(self, position: int) -> ResumingReader:
        """Return a reader that begins at a position, which must be here."""
        reader = ResumingReader(self, position)
        self._readers.add(reader)
        self.alone_since = None
        self.go_on()
        return reader

    def leave(self, reader: ResumingReader, reason: CancelReason) -> None:
        """A reader goes. Who stopped reading has not left, and is not waited for."""
        if reader not in self._readers:
            return
        self._readers.remove(reader)
        self._left_at = max(self._left_at, reader.position)
        if not self._readers:
            self.alone_since = trio.current_time()
            if reason is CancelReason.STALLED:
                self.give_up(reason)
            else:
                self.go_on()

    def stop(self) -> None:
        """End it, as its client wishes. Idempotent."""
        self._is_stopped = True
        self.give_up(CancelReason.STOPPED)

    def give_up(self, reason: CancelReason) -> None:
        """End whatever still runs of it. Idempotent."""
        self._is_given_up = True
        for generation in self._generations:
            generation.cancel(reason)
        self.go_on()

    async def wait_changed(self) -> None:
        """Wait until more was said, or all."""
        await self._changed.wait()

    def go_on(self) -> None:
        """Listen, unless it is over or too far ahead of its readers."""
        shall_listen = self.ended_at is None and not self._is_ahead()
        if self._choices is not None and shall_listen is not self._is_listening:
            self._is_listening = shall_listen
            self._choices.listen(self._take if shall_listen else None)

    def _take(self) -> None:
        """Write down what has come."""
        assert self._choices is not None
        try:
            for index, events in self._choices.take_now():
                for event in events:
                    self._write(index, event)
            if self.ended_at is None and self._choices.are_over:
                self._end(self.script.end())
        except Exception as error:
            # Whoever calls serves all streams, and must not suffer from one.
            log.exception("answer_failed", exc_info=error)
            self.failure = server_error()
            self._end([])
            self.give_up(CancelReason.STOPPED)
        self.go_on()

    def _write(self, index: int, event: Event) -> None:
        if self.ended_at is not None:
            return
        frames = self.script.write(index, event, is_stopped=self._is_stopped)
        if isinstance(event, Failed):
            # One error ends the whole answer.
            self.failure = event.error
            self._end(frames)
            if not self._is_given_up:
                self.give_up(CancelReason.STOPPED)
        else:
            self._say(frames)

    def _say(self, frames: list[bytes]) -> None:
        for frame in frames:
            self.transcript.add(frame)
        positions = [reader.position for reader in self._readers]
        self.transcript.forget(max(positions, default=self._left_at), self._config.buffer_bytes)
        self._changed.set()
        self._changed = trio.Event()

    def _end(self, frames: list[bytes]) -> None:
        if self.ended_at is None:
            self.ended_at = trio.current_time()
            self._say(frames)
            self.transcript.is_over = True

    def _is_ahead(self) -> bool:
        if self._is_given_up:
            return False  # its end is still to be taken
        fastest = max((reader.position for reader in self._readers), default=None)
        if fastest is None:
            # Those who come back find what was said since the last of them left.
            return self.transcript.bytes_since(self._left_at) >= self._config.buffer_bytes
        return self.transcript.bytes_since(fastest) >= self._config.ahead_bytes


class ResumingReader:
    """Somebody who reads an answer. Part of a request, with which it ends.

    Args:
      answer: what it reads.
      position: of the next frame.

    Attributes:
      position: the same.
    """

    def __init__(self, answer: ResumableAnswer, position: int) -> None:
        self.position = position
        self._answer = answer

    @property
    def has_begun(self) -> bool:
        """Whether anything may have been spent on it: it outlives its readers, begun or not."""
        return True

    @property
    def is_lost(self) -> bool:
        """Whether what it should read next is forgotten: it is far slower than another one."""
        return self.position < self._answer.transcript.first

    @property
    def end(self) -> int:
        """The position behind all that was said so far."""
        return self._answer.transcript.end

    def lost(self) -> RequestError:
        """Return what to tell a reader that is lost."""
        first = self._answer.transcript.first
        return RequestError(
            f"events before {first} of this answer are not kept any more",
            status=410,
            code="resume_expired",
        )

    @property
    def is_done(self) -> bool:
        """Whether it has read all there will ever be."""
        transcript = self._answer.transcript
        return transcript.is_over and self.position == transcript.end

    @property
    def failure(self) -> RequestError | None:
        """What went wrong, if something has."""
        return self._answer.failure

    def take(self) -> list[bytes]:
        """Return all frames that it has not read."""
        frames = self._answer.transcript.since(self.position)
        self.position += len(frames)
        self._answer.go_on()
        return frames

    async def wait(self) -> None:
        """Wait until there may be something to take."""
        await self._answer.wait_changed()

    def cancel(self, reason: CancelReason) -> None:
        """Go; the answer stays for a while. Idempotent."""
        self._answer.leave(self, reason)
