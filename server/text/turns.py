"""Turns among keys that share a few slots: start-time fair by the seconds that each key has used.

Pure: `now` is handed in. A key is a tenant, or a client's address where there are no tenants.
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
    """A job may not wait: its own key's line, or all lines together, hold as many as may be.

    Attributes:
      line: which of the two.
    """

    def __init__(self, line: FullLine) -> None:
        super().__init__(line)
        self.line = line


@dataclass(slots=True, eq=False)
class Job(Generic[T]):
    """Something that waits for a slot, or has one.

    Attributes:
      key: of the tenant or address that the job is of.
      item: what the caller knows it by.
      began_at: when it got its slot; None while it waits.
    """

    key: str
    item: T
    began_at: float | None = None


@dataclass(slots=True)
class _Line(Generic[T]):
    """The jobs of one key.

    Attributes:
      used_s: virtual time: what its ended jobs took, and what it would have got while it was away.
      waiting: in order of arrival.
      running: with a slot.
      last_turn: number of the job that it began last: among equals the one goes first that has
        waited longest since.
    """

    used_s: float
    last_turn: int = 0
    waiting: OrderedDict[int, Job[T]] = field(default_factory=OrderedDict)
    running: dict[int, Job[T]] = field(default_factory=dict)

    def used_by(self, now: float) -> float:
        """Return what the key has used, running jobs included."""
        under_way = sum(now - (job.began_at or now) for job in self.running.values())
        return self.used_s + under_way

    @property
    def is_idle(self) -> bool:
        """Whether it neither waits nor runs."""
        return not self.waiting and not self.running


class Turns(Generic[T]):
    """Which job is next.

    Of the keys with a waiting job the one that has used least goes first; a key that comes after a
    pause begins where the others are, so that it neither saves time up nor pays for it twice. A
    running job cannot be taken back. So while other keys are there, or were of late, one key leaves
    one slot to them: the next job of another key finds it free.

    Args:
      slots: jobs that run at once.
      config: bounds.

    Attributes:
      refused: jobs that found a line full, by which line.
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
        """Jobs without a slot."""
        return self._num_waiting

    @property
    def num_running(self) -> int:
        """Jobs with one."""
        return self._num_running

    def join(self, key: str, item: T, now: float) -> Job[T]:
        """Let a job wait.

        Raises:
          LineFull: it may not.
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
        """Give a slot to the next job; None if there is no slot, or no job for it."""
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
        """Take back a job that waits."""
        line = self._lines[job.key]
        del line.waiting[id(job)]
        self._one_less(job.key, line)

    def end(self, job: Job[T], now: float) -> None:
        """Take back a job's slot, and charge its key for the time."""
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
"""When to come again where a line is full: it moves by hundreds of jobs a second."""
_LINE: Final[ContextVar[str]] = ContextVar("line", default="")


def enter_line(key: str) -> None:
    """Let the running task, and those that it starts, wait in the line of a key."""
    _LINE.set(key)


def current_line() -> str:
    """Return the key of the line that the running task waits in."""
    return _LINE.get()


def join_line(turns: Turns[T], item: T, what: str) -> Job[T]:
    """Let the running task's job wait for its turn.

    Raises:
      RequestError: 429 if its own line is full, 503 if all lines together are.
    """
    try:
        return turns.join(current_line(), item, trio.current_time())
    except LineFull as full:
        if full.line == OWN_LINE:
            raise too_many_waiting(f"too many of your {what}", RETRY_S) from None
        raise overloaded(f"too many {what}", RETRY_S) from None
