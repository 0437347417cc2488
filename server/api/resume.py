"""Answers that outlive their connections: written down frame by frame, read from any position.

A client that comes back within a grace goes on reading where it stopped.
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
    """Numbered frames.

    Attributes:
      first: position of the oldest frame that is still here.
      num_bytes: of the frames that are here.
      is_over: nothing follows.
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
        """Say something."""
        assert not self.is_over, "nothing follows the end"
        self._starts.append(self._said_bytes)
        self._frames.append(frame)
        self._said_bytes += len(frame)
        self.num_bytes += len(frame)

    def since(self, position: int) -> list[bytes]:
        """Return the frames from a position on, which is here or the end."""
        assert self.first <= position <= self.end, "forgotten, or not said yet"
        return list(islice(self._frames, position - self.first, None))

    def bytes_since(self, position: int) -> int:
        """Return how many bytes there are from a position on."""
        if position >= self.end:
            return 0
        return self._said_bytes - self._starts[max(position, self.first) - self.first]

    def forget(self, until: int, max_bytes: int) -> None:
        """Forget the oldest frames before a position, until no more than so many bytes are left."""
        while self.num_bytes > max_bytes and self.first < min(until, self.end):
            self.num_bytes -= len(self._frames.popleft())
            self._starts.popleft()
            self.first += 1


log = structlog.get_logger(__name__)


class ResumableAnswer:
    """One answer.

    Args:
      serializer: of the endpoint.
      fingerprint: of what was asked for.
      config: bounds.
      model: name of the one that it was begun on.
      digest: of that model's version; empty for one that is in no store.

    Attributes:
      serializer: as above.
      fingerprint: as above.
      model: as above.
      digest: as above.
      is_outdated: its model was removed; another one may have the name.
      transcript: what has been said so far.
      failure: what went wrong, once something has.
      alone_since: since when it has no reader; None while it has one.
      grace_s: how long it goes on then.
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
        """Write down what comes of a stream, which ends when this answer is given up."""
        self._stream = stream
        for index in range(len(stream.generations)):
            stream.add_stage(index, ResumeLog(self, index))
        self._say(self.serializer.begin())
        self.go_on()

    def read_from(self, position: int) -> ResumingReader:
        """Return a reader that begins at a position, which must be here."""
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
        """End it, as its client wishes. Idempotent."""
        self.serializer.is_stopped = True
        self.give_up(CancelReason.STOPPED)

    def give_up(self, reason: CancelReason) -> None:
        """End whatever still runs of it. Idempotent."""
        self._is_given_up = True
        if self._stream is not None:
            self._stream.cancel(reason)
        self.go_on()

    async def wait_changed(self) -> None:
        """Wait until more was said, or all."""
        await self._changed.wait()

    def forgotten(self) -> RequestError:
        """Return what to tell a reader of what is not kept any more."""
        return RequestError(
            f"events before {self.transcript.first} of this answer are not kept any more",
            status=410,
            code="resume_expired",
        )

    def go_on(self) -> None:
        """Listen, unless it is over or too far ahead of its readers."""
        shall_listen = self.ended_at is None and not self._is_ahead()
        if self._stream is not None and shall_listen is not self._is_listening:
            self._is_listening = shall_listen
            self._stream.listen(self._note_logged if shall_listen else None, self._fail)
        if self.ended_at is not None:
            self._stream = None  # its stages hold this answer: they would hold one another

    def _note_logged(self, _: Events) -> None:
        """Look whether that was all, or enough for now; the log has written it down."""
        if self.ended_at is None and self._stream is not None and self._stream.is_over:
            self._end(self.serializer.end())
        self.go_on()

    def _fail(self, error: Exception) -> None:
        """End it by an error of this server."""
        log.error("answer_failed", exc_info=error)
        self.failure = server_error()
        self._end([])
        self.give_up(CancelReason.STOPPED)

    def note(self, index: int, event: Event) -> None:
        """Write down an event of a choice."""
        if self.ended_at is not None:
            return
        frames = self.serializer.event(index, event)
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
            # A client that comes back finds what was written since the last reader left.
            return self.transcript.bytes_since(self._left_at) >= self._config.buffer_bytes
        return self.transcript.bytes_since(fastest) >= self._config.ahead_bytes


class ResumeLog(OutputStage):
    """The output stage that writes a choice's events down, as frames that its readers get.

    Args:
      answer: of the choice.
      index: of the choice.
    """

    def __init__(self, answer: ResumableAnswer, index: int) -> None:
        self._answer = answer
        self._index = index

    def push(self, event: Event) -> Sequence[Event]:
        """Write down one event."""
        self._answer.note(self._index, event)
        return (event,)


class ResumingReader:
    """One reader of an answer. Part of a request, with which it ends.

    Args:
      answer: what it reads.
      position: of the next frame.

    Attributes:
      answer: the same.
      position: the same.
    """

    def __init__(self, answer: ResumableAnswer, position: int) -> None:
        self.answer = answer
        self.position = position

    @property
    def has_begun(self) -> bool:
        """Whether anything may have been spent on it: it outlives its readers, begun or not."""
        return True

    @property
    def is_lost(self) -> bool:
        """Whether what it should read next is forgotten: it is far slower than another one."""
        return self.position < self.answer.transcript.first

    @property
    def is_done(self) -> bool:
        """Whether it has read all there will ever be."""
        transcript = self.answer.transcript
        return transcript.is_over and self.position == transcript.end

    def take(self) -> list[bytes]:
        """Return all frames that it has not read."""
        frames = self.answer.transcript.since(self.position)
        self.position += len(frames)
        self.answer.go_on()
        return frames

    def cancel(self, reason: CancelReason) -> None:
        """Go; the answer stays for a while. Idempotent."""
        self.answer.leave(self, reason)


class Name(NamedTuple):
    """What an answer is found by.

    Attributes:
      owner: the tenant that pays with its own answers when room runs out; empty where there are no
        tenants, and all clients share one room then.
      scope: of the client; the same text of another client is another name.
      text: the client's word, or an id of ours.
    """

    owner: str
    scope: bytes
    text: str


class KeptAnswers:
    """All resumable answers of this process.

    Args:
      config: bounds.
      is_leaving: whether this process is to leave: then answers without readers end at once.
      count: told of what becomes of answers, by a word.
      sweeps: called with the time at each sweep, to forget what is old elsewhere.
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
        """Return the answer of a name, or None if there is none.

        Raises:
          RequestError: 409, something else was asked for by that name.
        """
        self._forget_old(trio.current_time())
        answer = self._answers.get(name)
        if answer is None or answer.is_outdated:
            return None
        if fingerprint not in (None, answer.fingerprint):
            self._count("conflict")
            raise RequestError(
                "another request was sent with this idempotency key; use a key for each",
                status=409,
                code="idempotency_conflict",
                param="idempotency-key",
            )
        return answer

    def forget_model(self, model: str) -> None:
        """Give the answers of a model and its adapters, or of one adapter, to new readers no more:
        it was removed.

        Args:
          model: its name, behind which that of an adapter may stand.
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
        """Begin an answer and keep it, in the place of one of that name.

        Raises:
          RequestError: refused; nothing was begun or forgotten.
        """
        live = [other for other, one in self._answers.items() if one.ended_at is None]
        num_own = sum(other.owner == name.owner for other in live)
        most = self._config.max_live
        # Without tenants there are no shares.
        most_own = max(1, int(most * self._config.owner_share)) if name.owner else most
        if len(live) >= most or num_own >= most_own:
            raise RequestError(
                f"{len(live)} resumable answers are under way, {num_own} of them yours",
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
        """Return a reader of an answer that is kept.

        Raises:
          RequestError: 400, it has not come so far; 410, that part is forgotten.
        """
        transcript = answer.transcript
        if position > transcript.end:
            raise RequestError(
                f"only {transcript.end} events of this answer were sent so far",
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
        """Give up answers that stay without readers, and forget what is old, until cancelled."""
        task_status.started()
        while True:
            await trio.sleep(self._config.sweep_s)
            self.sweep(trio.current_time())

    def sweep(self, now: float) -> None:
        """Look whether a time is over."""
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

    def _forget_old(self, now: float) -> None:
        oldest = now - self._config.ttl_s
        self._answers = {
            name: answer
            for name, answer in self._answers.items()
            if answer.ended_at is None or answer.ended_at > oldest
        }

    def _make_room(self) -> None:
        """Forget finished answers until the rest fits."""
        self._evict(dict.fromkeys(self._answers, 1), self._config.max_kept)
        sizes = {
            name: answer.transcript.num_bytes
            for name, answer in self._answers.items()
            if answer.ended_at is not None
        }
        self._evict(sizes, self._config.max_kept_bytes)

    def _evict(self, weights: dict[Name, int], most: int) -> None:
        """Forget finished answers until all weights add up to no more than `most`.

        The owner with the most weight loses its oldest finished one each time, so that an owner
        with less than its equal part loses nothing.
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
