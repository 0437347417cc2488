"""Resumable answers, which outlive their connection: an answer's frames are logged and can be read
from any position.

A client that returns within a grace period continues where it stopped.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import structlog
import trio

from triolet.config import SEPARATOR
from triolet.errors import RequestError, server_error

from ..contract.generation import CancelReason, Event, Events, Failed
from ..contract.output_stage import OutputStage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triolet.config import ResumeConfig

    from ..contract.output_stream import OutputStream
    from .stream import Serializer


class Transcript:
    """A log of numbered frames.

    Attributes:
      first: position of the oldest stored frame.
      num_bytes: size of the stored frames.
      is_over: whether the log is complete.
    """

    def __init__(self) -> None:
        self.first = 0
        self.num_bytes = 0
        self.is_over = False
        self._frames: deque[bytes] = deque()
        self._said_bytes = 0
        self._starts: deque[int] = deque()

    @property
    def end(self) -> int:
        """The position of the next frame."""
        return self.first + len(self._frames)

    def add(self, frame: bytes) -> None:
        """Append a frame."""
        assert not self.is_over, "no frame may follow the end"
        self._starts.append(self._said_bytes)
        self._frames.append(frame)
        self._said_bytes += len(frame)
        self.num_bytes += len(frame)

    def since(self, position: int) -> list[bytes]:
        """Return the frames from a position on, which must be stored or the end."""
        assert self.first <= position <= self.end, "position is not in the log"
        return list(islice(self._frames, position - self.first, None))

    def bytes_since(self, position: int) -> int:
        """Return the number of bytes from a position on."""
        if position >= self.end:
            return 0
        return self._said_bytes - self._starts[max(position, self.first) - self.first]

    def forget(self, until: int, max_bytes: int) -> None:
        """Remove the oldest frames before a position until at most `max_bytes` are left."""
        while self.num_bytes > max_bytes and self.first < min(until, self.end):
            self.num_bytes -= len(self._frames.popleft())
            self._starts.popleft()
            self.first += 1


log = structlog.get_logger(__name__)


class ResumableAnswer:
    """One answer.

    Args:
      serializer: the endpoint's serializer.
      fingerprint: digest of the request's content.
      config: limits.
      model: name of the model that it was started on.
      digest: digest of that model's version; empty for a model that is not in a store.

    Attributes:
      serializer: see Args.
      fingerprint: see Args.
      model: see Args.
      digest: see Args.
      is_outdated: whether its model was removed; another one may have the name now.
      transcript: the frames so far.
      failure: its error, if it has failed.
      alone_since: since when it has had no reader; None with a reader.
      grace_s: how long it continues without a reader.
      ended_at: when it ended; None while it runs.
    """

    def __init__(
        self,
        serializer: Serializer,
        fingerprint: bytes,
        config: ResumeConfig,
        model: str,
        digest: str = "",
    ) -> None:
        self.serializer = serializer
        self.fingerprint = fingerprint
        self.model = model
        self.digest = digest
        self.is_outdated = False
        self.transcript = Transcript()
        self.failure: RequestError | None = None
        self.alone_since: float | None = trio.current_time()
        self.grace_s = config.grace_s
        self.ended_at: float | None = None
        self._config = config
        self._stream: OutputStream | None = None
        self._readers: set[ResumingReader] = set()
        self._left_at = 0
        self._is_listening = self._is_given_up = False
        self._changed = trio.Event()

    def start(self, stream: OutputStream) -> None:
        """Log the events of a stream, which is cancelled with this answer."""
        self._stream = stream
        for index in range(len(stream.generations)):
            stream.add_stage(index, ResumeLog(self, index))
        self._say(self.serializer.begin())
        self.go_on()

    def read_from(self, position: int) -> ResumingReader:
        """Return a reader that starts at a position, which must be stored."""
        reader = ResumingReader(self, position)
        self._readers.add(reader)
        self.alone_since = None
        self.go_on()
        return reader

    def leave(self, reader: ResumingReader, reason: CancelReason) -> None:
        """Remove a reader. A stalled one aborts the answer; after others it runs for `grace_s`."""
        if reader not in self._readers:
            return
        self._readers.remove(reader)
        self._left_at = max(self._left_at, reader.position)
        if not self._readers:
            self.alone_since = trio.current_time()
            is_away = reason is CancelReason.WENT_AWAY
            self.grace_s = self._config.away_grace_s if is_away else self._config.grace_s
            if reason is CancelReason.STALLED:
                self.give_up(reason)
            else:
                self.go_on()

    def stop(self) -> None:
        """Cancel it for its client. Idempotent."""
        self.serializer.is_stopped = True
        self.give_up(CancelReason.STOPPED)

    def give_up(self, reason: CancelReason) -> None:
        """Cancel it if it still runs. Idempotent."""
        self._is_given_up = True
        if self._stream is not None:
            self._stream.cancel(reason)
        self.go_on()

    async def wait_changed(self) -> None:
        """Wait until frames are added or the answer ends."""
        await self._changed.wait()

    def forgotten(self) -> RequestError:
        """Return the error for a reader if its next frames were removed."""
        return RequestError(
            f"events before {self.transcript.first} of this answer are no longer stored",
            status=410,
            code="resume_expired",
        )

    def go_on(self) -> None:
        """Listen to the stream unless it has ended or is too far ahead of the readers."""
        shall_listen = self.ended_at is None and not self._is_ahead()
        if self._stream is not None and shall_listen is not self._is_listening:
            self._is_listening = shall_listen
            self._stream.listen(self._note_logged if shall_listen else None, self._fail)
        if self.ended_at is not None:
            self._stream = None  # break the reference cycle with its stages

    def _note_logged(self, _: Events) -> None:
        """Check whether the answer has ended or must pause; the log stage has recorded the
        events."""
        if self.ended_at is None and self._stream is not None and self._stream.is_over:
            self._end(self.serializer.end())
        self.go_on()

    def _fail(self, error: Exception) -> None:
        """End it with an internal error."""
        log.error("answer_failed", exc_info=error)
        self.failure = server_error()
        self._end([])
        self.give_up(CancelReason.STOPPED)

    def note(self, index: int, event: Event) -> None:
        """Log an event of a choice."""
        if self.ended_at is not None:
            return
        frames = self.serializer.event(index, event)
        if isinstance(event, Failed):
            # An error of one choice ends the whole answer.
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
            return False  # its end must still be read
        fastest = max((reader.position for reader in self._readers), default=None)
        if fastest is None:
            # A client that returns finds what was written since the last reader left.
            return self.transcript.bytes_since(self._left_at) >= self._config.buffer_bytes
        return self.transcript.bytes_since(fastest) >= self._config.ahead_bytes


class ResumeLog(OutputStage):
    """The output stage that logs a choice's events as frames for readers.

    Args:
      answer: the choice's answer.
      index: index of the choice.
    """

    def __init__(self, answer: ResumableAnswer, index: int) -> None:
        self._answer = answer
        self._index = index

    def push(self, event: Event) -> Sequence[Event]:
        """Log an event."""
        self._answer.note(self._index, event)
        return (event,)


class ResumingReader:
    """A reader of an answer. It belongs to a request and ends with it.

    Args:
      answer: the answer to read.
      position: position of the next frame.

    Attributes:
      answer: see Args.
      position: see Args.
    """

    def __init__(self, answer: ResumableAnswer, position: int) -> None:
        self.answer = answer
        self.position = position

    @property
    def has_begun(self) -> bool:
        """Always True: the answer outlives its readers, started or not."""
        return True

    @property
    def is_lost(self) -> bool:
        """Whether its next frame was removed because it is far slower than another reader."""
        return self.position < self.answer.transcript.first

    @property
    def is_done(self) -> bool:
        """Whether it has read the complete answer."""
        transcript = self.answer.transcript
        return transcript.is_over and self.position == transcript.end

    def take(self) -> list[bytes]:
        """Return all unread frames."""
        frames = self.answer.transcript.since(self.position)
        self.position += len(frames)
        self.answer.go_on()
        return frames

    def cancel(self, reason: CancelReason) -> None:
        """Stop reading; the answer stays for a while. Idempotent."""
        self.answer.leave(self, reason)


class Name(NamedTuple):
    """The key of an answer.

    Attributes:
      owner: the tenant; its answers are evicted first if it uses too much memory; empty without
        tenants, when all clients share the room.
      scope: the client; equal texts of two clients are different keys.
      text: the client's idempotency key, or an id of ours.
    """

    owner: str
    scope: bytes
    text: str


class KeptAnswers:
    """All resumable answers of this process.

    Args:
      config: limits.
      is_leaving: whether this process is shutting down: answers without readers then end at once.
      count: called with the outcome of each answer.
      sweeps: called with the time at each sweep, to remove expired data elsewhere.
    """

    def __init__(
        self,
        config: ResumeConfig,
        is_leaving: Callable[[], bool],
        count: Callable[[str], None],
        sweeps: Sequence[Callable[[float], None]] = (),
    ) -> None:
        self._config = config
        self._is_leaving = is_leaving
        self._count = count
        self._sweeps = sweeps
        self._answers: dict[Name, ResumableAnswer] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, name: Name, fingerprint: bytes | None = None) -> ResumableAnswer | None:
        """Return the answer with a key, or None.

        Raises:
          RequestError: 409, the key was used for another request.
        """
        answer = self._answers.get(name)
        if answer is None or answer.is_outdated or self._is_old(answer, trio.current_time()):
            return None
        if fingerprint not in (None, answer.fingerprint):
            self._count("conflict")
            raise RequestError(
                "the idempotency key was used for another request; use a new key for each request",
                status=409,
                code="idempotency_conflict",
                param="idempotency-key",
            )
        return answer

    def keeps(self, name: Name, *, only_running: bool = False) -> bool:
        """Return whether a retry would join a kept answer, or one that still runs."""
        answer = self.find(name)
        return (
            answer is not None
            and answer.failure is None
            and (answer.ended_at is None or not only_running)
        )

    def forget_model(self, model: str) -> None:
        """Stop giving the answers of a removed model and its adapters, or of one adapter, to new
        readers.

        Args:
          model: its name, or MODEL:ADAPTER.
        """
        for answer in self._answers.values():
            if model in (answer.model, answer.model.partition(SEPARATOR)[0]):
                answer.is_outdated = True

    def begin(
        self,
        name: Name,
        answer: ResumableAnswer,
        submit: Callable[[], OutputStream],
    ) -> None:
        """Start an answer and store it, replacing an earlier one with this key.

        Raises:
          RequestError: refused; nothing was started or removed.
        """
        live = [other for other, one in self._answers.items() if one.ended_at is None]
        num_own = sum(other.owner == name.owner for other in live)
        most = self._config.max_live
        # Without tenants there are no shares.
        most_own = max(1, int(most * self._config.owner_share)) if name.owner else most
        if len(live) >= most or num_own >= most_own:
            raise RequestError(
                f"{len(live)} resumable answers are running, {num_own} of them yours",
                status=503,
                code="overloaded",
                param="idempotency-key",
                retry_after_s=1.0,
            )
        answer.start(submit())
        self._answers.pop(name, None)
        self._answers[name] = answer
        self._make_room()
        self._count("begun")

    def join(self, answer: ResumableAnswer, position: int) -> ResumingReader:
        """Return a reader of a stored answer.

        Raises:
          RequestError: 400, the position is in the future; 410, it was removed.
        """
        transcript = answer.transcript
        if position > transcript.end:
            raise RequestError(
                f"the answer has only {transcript.end} events so far",
                status=400,
                code="invalid_request_error",
                param="last-event-id",
            )
        if position < transcript.first:
            self._count("forgotten")
            raise answer.forgotten()
        self._count("joined")
        return answer.read_from(position)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Cancel answers that stay without readers, and remove old ones, until cancelled."""
        task_status.started()
        while True:
            await trio.sleep(self._config.sweep_s)
            self.sweep(trio.current_time())

    def sweep(self, now: float) -> None:
        """Apply all time limits."""
        for answer in self._answers.values():
            grace_s = 0.0 if self._is_leaving() else answer.grace_s
            is_alone = answer.ended_at is None and answer.alone_since is not None
            if is_alone and now - (answer.alone_since or 0.0) >= grace_s:
                self._count("abandoned")
                answer.give_up(CancelReason.CLIENT_GONE)
        self._forget_old(now)
        self._make_room()
        for sweep in self._sweeps:
            sweep(now)

    def _is_old(self, answer: ResumableAnswer, now: float) -> bool:
        return answer.ended_at is not None and answer.ended_at <= now - self._config.ttl_s

    def _forget_old(self, now: float) -> None:
        self._answers = {
            name: answer for name, answer in self._answers.items() if not self._is_old(answer, now)
        }

    def _make_room(self) -> None:
        """Remove finished answers until the rest fits."""
        self._evict(dict.fromkeys(self._answers, 1), self._config.max_kept)
        sizes = {
            name: answer.transcript.num_bytes
            for name, answer in self._answers.items()
            if answer.ended_at is not None
        }
        self._evict(sizes, self._config.max_kept_bytes)

    def _evict(self, weights: dict[Name, int], most: int) -> None:
        """Remove finished answers until the weights add up to at most `most`.

        Each time, the owner with the largest weight loses its oldest finished answer, so an owner
        below an equal share loses nothing.
        """
        total = sum(weights.values())
        if total <= most:
            return
        held: Counter[str] = Counter()
        finished: dict[str, deque[Name]] = {}
        for name, weight in weights.items():
            held[name.owner] += weight
            if self._answers[name].ended_at is not None:
                finished.setdefault(name.owner, deque()).append(name)
        while total > most and finished:
            owner = max(finished, key=held.__getitem__)
            name = finished[owner].popleft()
            if not finished[owner]:
                del finished[owner]
            held[owner] -= weights[name]
            total -= weights[name]
            del self._answers[name]
            self._count("evicted")
