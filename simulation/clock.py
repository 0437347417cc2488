"""Virtual time for Trio: a clock that advances only while every task waits, and cheap timers.

A simulated fleet mostly waits: for the next frame, the next sweep, the end of a step. Trio ends
such a wait by cancelling it, which costs more than the work after it. A timer of this clock only
reschedules the task, in the same turn of the loop in which Trio would have cancelled it. It relies
on two internals of Trio: how to find out whether a task is cancelled, and how that is raised.
"""

from __future__ import annotations

from contextlib import contextmanager
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

import trio
from trio.lowlevel import Abort, current_task, reschedule, wait_task_rescheduled

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S: Final = 1000.0
"""Start of virtual time: far enough from 0 that "never" and "at the start" differ."""
REAL_WAIT_S: Final = 0.05
NEVER: Final = float("inf")

_sleep, _sleep_until = trio.sleep, trio.sleep_until


class Timer:
    """A wait of one task for a time, which others may bring forward. For one use.

    Args:
      clock: clock of the run.
      due: end of the wait; `NEVER` to wait for `bring_forward` or `fire`.
    """

    __slots__ = ("_clock", "_task", "due")

    def __init__(self, clock: VirtualClock, due: float) -> None:
        self.due = due
        self._clock = clock
        self._task: trio.lowlevel.Task | None = None

    async def wait(self) -> None:
        """Wait. If the task is cancelled before it runs again, raises Cancelled even if the timer
        is due."""
        self._task = task = current_task()
        if self.due != NEVER:
            self._clock.add(self)
        await wait_task_rescheduled(self._abort)
        if task._cancel_status.effectively_cancelled:
            raise trio.Cancelled._create(source="deadline")

    def bring_forward(self, due: float) -> None:
        """Let the wait end at `due`, if that is earlier."""
        if self._task is None or due >= self.due:
            return
        self.due = due
        if due <= self._clock.current_time():
            self.fire()
        else:
            self._clock.add(self)

    def fire(self) -> None:
        """End the wait now. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            reschedule(task)

    def _abort(self, _: object) -> Abort:
        self._task = None
        return Abort.SUCCEEDED


class VirtualClock(trio.abc.Clock):
    """A clock that jumps to the next due time when every task waits."""

    def __init__(self) -> None:
        self._now = START_S
        # (due, order, timer); a timer that was brought forward is popped a second time later,
        # without effect.
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = 0

    def start_clock(self) -> None:
        """Do nothing."""

    def current_time(self) -> float:
        """Return virtual seconds."""
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Jump to the next due time. Trio calls this only if no task can run before it."""
        timers = self._timers
        while timers and timers[0][2]._task is None:
            heappop(timers)
        due = min(deadline, timers[0][0]) if timers else deadline
        if due == NEVER:
            # Only Trio's own task has none: a real socket wakes it up.
            return REAL_WAIT_S
        self._now = now = max(self._now, due)
        while timers and timers[0][0] <= now:
            heappop(timers)[2].fire()
        return 0.0

    def add(self, timer: Timer) -> None:
        """Fire a timer when it is due."""
        self._order += 1
        heappush(self._timers, (timer.due, self._order, timer))

    async def sleep(self, seconds: float) -> None:
        """See trio.sleep."""
        if seconds > 0:
            await Timer(self, self._now + seconds).wait()
        else:
            await _sleep(seconds)

    async def sleep_until(self, deadline: float) -> None:
        """See trio.sleep_until."""
        if deadline > self._now:
            await Timer(self, deadline).wait()
        else:
            await _sleep_until(deadline)

    @contextmanager
    def rules(self) -> Iterator[None]:
        """Make this clock the current one for timers."""
        functions = {name: getattr(trio, name) for name in ("current_time", "sleep", "sleep_until")}
        for name in functions:
            setattr(trio, name, getattr(self, name))
        try:
            yield
        finally:
            for name, function in functions.items():
                setattr(trio, name, function)


class ClockAlarm:
    """See transport.memory_pipe.Alarm."""

    def __init__(self) -> None:
        self._timers: list[Timer] = []

    async def wait(self, due: float) -> None:
        """Wait until `due`, or an earlier time passed to `expect`."""
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, VirtualClock), "runs in virtual time only"
        timer = Timer(clock, due)
        self._timers.append(timer)
        try:
            await timer.wait()
        finally:
            self._timers.remove(timer)

    def expect(self, due: float) -> None:
        """End waits at `due` at the latest."""
        for timer in self._timers:
            timer.bring_forward(due)

    def ring(self) -> None:
        """End waits now."""
        for timer in self._timers:
            timer.fire()
