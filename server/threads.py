"""Work in threads: shared fairly among clients, with errors that keep nothing alive."""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import trio

from triolet.errors import RequestError, overloaded, too_many_waiting

from .turns import OWN_LINE, LineFull, Turns

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from triolet.config_queue import TurnsConfig

    from .turns import Job

T = TypeVar("T")

RETRY_S: Final = 1.0
"""When to come again where a line is full: it moves by hundreds of jobs a second."""
_LINE: Final[ContextVar[str]] = ContextVar("line", default="")


def enter_line(key: str) -> None:
    """Let the running task, and those that it starts, wait in the line of a key."""
    _LINE.set(key)


def current_line() -> str:
    """Return the key of the line that the running task waits in."""
    return _LINE.get()


class LineStatistics(NamedTuple):
    """What there is of a limiter at one moment, by the names of `trio.CapacityLimiter`."""

    borrowed_tokens: int
    tasks_waiting: int


class FairLimiter:
    """Slots for jobs of many keys, given in turns. `trio.to_thread.run_sync` takes it as `limiter`.

    Args:
      slots: jobs at once.
      config: bounds.
      what: waits here, for errors: "texts wait for the tokenizer".

    Attributes:
      turns: decides.
    """

    def __init__(self, slots: int, config: TurnsConfig, what: str) -> None:
        self.turns: Turns[trio.Event] = Turns(slots, config)
        self._what = what
        self._jobs: dict[object, Job[trio.Event]] = {}

    def statistics(self) -> LineStatistics:
        """Return how many jobs run and wait."""
        return LineStatistics(self.turns.num_running, self.turns.num_waiting)

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """Wait for a slot, in the line of the running task.

        Raises:
          RequestError: 429 if its own line is full, 503 if all lines together are.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        job = join_line(self.turns, trio.Event(), self._what)
        self._hand_out()
        try:
            if job.began_at is None:
                await job.item.wait()
            else:
                await trio.lowlevel.cancel_shielded_checkpoint()
        except BaseException:
            if job.began_at is None:
                self.turns.leave(job)
            else:
                self._end(job)
            raise
        self._jobs[borrower] = job

    def release_on_behalf_of(self, borrower: object) -> None:
        """Give a slot back."""
        self._end(self._jobs.pop(borrower))

    async def __aenter__(self) -> None:
        await self.acquire_on_behalf_of(trio.lowlevel.current_task())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release_on_behalf_of(trio.lowlevel.current_task())

    def _end(self, job: Job[trio.Event]) -> None:
        self.turns.end(job, trio.current_time())
        self._hand_out()

    def _hand_out(self) -> None:
        now = trio.current_time()
        while (job := self.turns.begin(now)) is not None:
            job.item.set()


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


async def in_thread(
    work: Callable[[], T],
    limiter: trio.CapacityLimiter | FairLimiter,
    *,
    abandon_on_cancel: bool = False,
) -> T:
    """Return what some work returns, done in a thread.

    An error that is raised out of a thread, or one whose cause was, stays in a circle with Trio's
    frames, which hold what the work was about, bodies of many MiB, until the garbage collector
    comes by: seldom. The thread itself keeps what it returns until it runs again, on a busy machine
    long after; an error that is raised here would meanwhile keep its request. So the thread returns
    what a refusal says, and the refusal is made here.

    Args:
      work: what to do.
      limiter: of the threads that do such work.
      abandon_on_cancel: whether to leave it to itself when nobody waits any more.

    Raises:
      RequestError: as the work does, without what it came from.
    """
    done = await trio.to_thread.run_sync(
        partial(_result_or_refusal, work),
        abandon_on_cancel=abandon_on_cancel,
        limiter=limiter,  # type: ignore[arg-type]  # it asks for acquire and release only
    )
    if isinstance(done, _Refusal):
        raise RequestError(**done.said)
    return done


class _Refusal(NamedTuple):
    """What a RequestError says.

    Attributes:
      said: its arguments.
    """

    said: dict[str, Any]


def _result_or_refusal(work: Callable[[], T]) -> T | _Refusal:
    try:
        return work()
    except RequestError as error:
        return _Refusal(error.said)
