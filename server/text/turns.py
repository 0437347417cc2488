"""A fair scheduler for the jobs of text processes: start-time fair queueing by seconds used per
key.

Pure: `now` is an argument. A key is a tenant, or a client's address without tenants.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeVar

import trio

from triolet.errors import overloaded, too_many_waiting

if TYPE_CHECKING:
    from triolet.config import TurnsConfig


T = TypeVar("T")

OWN_LINE: Final = "own_line"
ALL_LINES: Final = "all_lines"
FullLine = Literal["own_line", "all_lines"]


class LineFull(Exception):
    """A job was refused because its key's line, or all lines together, are full.

    Attributes:
      line: the line that is full.
    """

    def __init__(self, line: FullLine) -> None:
        super().__init__(line)
        self.line = line


@dataclass(slots=True, eq=False)
class Job(Generic[T]):
    """A job that waits for a slot or has one.

    Attributes:
      key: the job's tenant or address.
      item: the caller's identification of the job.
      began_at: when it got its slot; None while it waits.
    """

    key: str
    item: T
    began_at: float | None = None


@dataclass(slots=True)
class _Line(Generic[T]):
    """The jobs of one key.

    Attributes:
      used_s: virtual time: the time its ended jobs took, advanced while it was idle.
      waiting: waiting jobs in order of arrival.
      running: jobs with a slot.
      last_turn: number of the job that it started last; among equal keys, the lowest goes first.
    """

    used_s: float
    last_turn: int = 0
    waiting: OrderedDict[int, Job[T]] = field(default_factory=OrderedDict)
    running: dict[int, Job[T]] = field(default_factory=dict)

    def used_by(self, now: float) -> float:
        """Return the time that the key has used, including running jobs."""
        under_way = sum(now - (job.began_at or now) for job in self.running.values())
        return self.used_s + under_way

    @property
    def is_idle(self) -> bool:
        """Whether it has no waiting or running jobs."""
        return not self.waiting and not self.running


class Turns(Generic[T]):
    """Decides which job runs next.

    Of the keys with a waiting job, the one that has used the least time goes first. A key that
    returns after a pause starts at the level of the others, so it neither saves up time nor pays
    twice. Running jobs are not preempted, so while other keys are or recently were active, a key
    leaves one slot free for their next job.

    Args:
      slots: number of jobs that run concurrently.
      config: limits.

    Attributes:
      refused: number of jobs refused, by full line.
    """

    def __init__(self, slots: int, config: TurnsConfig) -> None:
        self._slots = slots
        self._config = config
        self._lines: dict[str, _Line[T]] = {}
        self._with_waiting: dict[str, _Line[T]] = {}
        self._num_waiting = self._num_running = self._num_begun = 0
        self._virtual_s = 0.0
        self._seen: tuple[str, float] = ("", float("-inf"))
        self._seen_before: tuple[str, float] = ("", float("-inf"))
        self.refused: Counter[FullLine] = Counter({OWN_LINE: 0, ALL_LINES: 0})

    @property
    def num_waiting(self) -> int:
        """Number of waiting jobs."""
        return self._num_waiting

    @property
    def num_running(self) -> int:
        """Number of running jobs."""
        return self._num_running

    def join(self, key: str, item: T, now: float) -> Job[T]:
        """Add a job to its key's line.

        Raises:
          LineFull: a line is full.
        """
        line = self._line_of(key)
        if len(line.waiting) >= self._config.max_waiting_each:
            self.refused[OWN_LINE] += 1
            raise LineFull(OWN_LINE)
        if self._num_waiting >= self._config.max_waiting:
            self.refused[ALL_LINES] += 1
            raise LineFull(ALL_LINES)
        if line.is_idle:
            line.used_s = max(line.used_s, self._virtual_s)
        job = Job(key, item)
        line.waiting[id(job)] = job
        self._with_waiting[key] = line
        self._num_waiting += 1
        self._note(key, now)
        return job

    def begin(self, now: float) -> Job[T] | None:
        """Give a slot to the next job; return None if no slot or job is available."""
        if not self._num_waiting or self._num_running >= self._slots:
            return None
        able = [
            (line.used_by(now), line.last_turn, key)
            for key, line in self._with_waiting.items()
            if not self._leaves_last_slot(key, line, now)
        ]
        if not able:
            return None
        used_s, _, key = min(able)
        line = self._lines[key]
        job = self._next_of(key, line)
        line.running[id(job)] = job
        job.began_at = now
        self._num_running += 1
        self._num_begun += 1
        line.last_turn = self._num_begun
        self._virtual_s = max(self._virtual_s, used_s)
        return job

    def leave(self, job: Job[T]) -> None:
        """Remove a waiting job."""
        line = self._lines[job.key]
        del line.waiting[id(job)]
        self._one_less(job.key, line)

    def end(self, job: Job[T], now: float) -> None:
        """Release a job's slot, and charge its key for the time."""
        line = self._lines[job.key]
        del line.running[id(job)]
        line.used_s += now - (now if job.began_at is None else job.began_at)
        self._num_running -= 1
        self._note(job.key, now)

    def _next_of(self, key: str, line: _Line[T]) -> Job[T]:
        _, job = line.waiting.popitem(last=False)
        self._one_less(key, line)
        return job

    def _one_less(self, key: str, line: _Line[T]) -> None:
        self._num_waiting -= 1
        if not line.waiting:
            del self._with_waiting[key]

    def _leaves_last_slot(self, key: str, line: _Line[T], now: float) -> bool:
        if self._slots == 1 or len(line.running) < self._slots - 1:
            return False
        other_at = self._seen[1] if self._seen[0] != key else self._seen_before[1]
        return now - other_at <= self._config.recent_s or len(line.running) < self._num_running

    def _note(self, key: str, now: float) -> None:
        if key != self._seen[0]:
            self._seen_before = self._seen
        self._seen = (key, now)

    def _line_of(self, key: str) -> _Line[T]:
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= 2 * self._config.max_waiting:
                self._lines = {k: one for k, one in self._lines.items() if not one.is_idle}
            line = self._lines[key] = _Line(self._virtual_s)
        return line


RETRY_S: Final = 1.0
"""`Retry-After` of a full line, which moves by hundreds of jobs per second."""
_LINE: Final[ContextVar[str]] = ContextVar("line", default="")


def enter_line(key: str) -> None:
    """Set the key of the running task and of tasks that it starts."""
    _LINE.set(key)


def current_line() -> str:
    """Return the running task's key."""
    return _LINE.get()


def join_line(turns: Turns[T], item: T, what: str) -> Job[T]:
    """Add the running task's job to its line.

    Raises:
      RequestError: 429 if its own line is full, 503 if all lines together are.
    """
    try:
        return turns.join(current_line(), item, trio.current_time())
    except LineFull as full:
        if full.line == OWN_LINE:
            raise too_many_waiting(f"too many of your {what}", RETRY_S) from None
        raise overloaded(f"too many {what}", RETRY_S) from None
