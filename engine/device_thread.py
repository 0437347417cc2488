"""The one thread that computes, seen from Trio.

Knows that jobs run one after another in the order given, and that a job which has begun is always
waited for: its blocks are being written, so they must not count as free. Knows nothing of what the
jobs do.
"""

from __future__ import annotations

import os
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar, TypeVarTuple, cast

import outcome
import torch
import trio

from triolet.errors import DeviceWedged, LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _Job:
    """A call and where its result goes."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.finished = trio.Event()
        self.result: outcome.Outcome[object] | None = None


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """What the thread is doing.

    Attributes:
      steps: jobs finished; a heartbeat's progress counter.
      busy_since: Trio time at which the running job began, None when idle.
      waiting: jobs accepted and not begun.
    """

    steps: int
    busy_since: float | None
    waiting: int


class DeviceThread:
    """Runs blocking calls on one dedicated thread.

    An async context manager: the thread starts on entry and is gone after exit.

    Args:
      max_waiting: calls that may wait behind the running one; the next caller waits in Trio, where
        it can be cancelled.
      num_threads: CPU threads of torch's kernels there; None leaves torch's own choice.
      close_timeout_s: how long a cancelled caller, or leaving the context, waits for the running
        call.
      niceness: how far the thread, and those that its kernels start, stand back for others.
    """

    def __init__(
        self,
        max_waiting: int,
        num_threads: int | None,
        close_timeout_s: float,
        niceness: int = 0,
    ) -> None:
        self._num_threads = num_threads
        self._close_timeout_s = close_timeout_s
        self._niceness = niceness
        self._room = trio.Semaphore(max_waiting + 1)
        self._jobs: queue.Queue[_Job | None] = queue.Queue(max_waiting + 2)
        self._steps = 0
        self._busy_since: float | None = None
        self._is_closing = False
        self._stopped = trio.Event()

    async def __aenter__(self) -> Self:
        trio_token = trio.lowlevel.current_trio_token()
        clock = trio.lowlevel.current_clock()
        # A daemon, so that a wedged kernel cannot keep the process from leaving.
        threading.Thread(
            target=self._work, args=(trio_token, clock), name="device", daemon=True
        ).start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose(self._close_timeout_s)

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run `fn(*args)` on the device thread and return what it returns.

        Cancellation: while waiting for room, at once. From then on the call runs to its end first.

        Raises:
          LocalProtocolError: the thread is closed.
          DeviceWedged: cancelled, and the call has not ended within `close_timeout_s` of it.
          Exception: whatever `fn` raises.
        """
        async with self._room:
            if self._is_closing:
                raise LocalProtocolError("the device thread is closed")
            job = _Job(lambda: fn(*args))
            self._jobs.put_nowait(job)
            try:
                await job.finished.wait()
            finally:
                with trio.move_on_after(self._close_timeout_s, shield=True):
                    if not job.finished.is_set():
                        await job.finished.wait()
                if not job.finished.is_set():
                    raise _wedged(self._close_timeout_s)
        assert job.result is not None
        return cast("T", job.result.unwrap())

    async def aclose(self, timeout_s: float) -> None:
        """Take no more calls, and wait until those accepted have run. Idempotent.

        Raises:
          DeviceWedged: they have not within `timeout_s`; the thread still holds the pool, so only
            leaving the process is safe.
        """
        if not self._is_closing:
            self._is_closing = True
            self._jobs.put_nowait(None)
        with trio.move_on_after(timeout_s, shield=True):
            await self._stopped.wait()
        if not self._stopped.is_set():
            raise _wedged(timeout_s)

    def statistics(self) -> DeviceStatistics:
        """Return what the thread is doing, without waiting."""
        return DeviceStatistics(self._steps, self._busy_since, self._jobs.qsize())

    def _work(self, trio_token: trio.lowlevel.TrioToken, clock: trio.abc.Clock) -> None:
        if self._niceness:
            # Linux keeps niceness by thread. Relative, because an inherited value may not be
            # lowered.
            thread = threading.get_native_id()
            own = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, own + self._niceness)
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        while (job := self._jobs.get()) is not None:
            self._busy_since = clock.current_time()
            job.result = outcome.capture(job.call)
            self._busy_since = None
            self._steps += 1
            if not _tell(trio_token, job.finished):
                return
        _tell(trio_token, self._stopped)


def _wedged(timeout_s: float) -> DeviceWedged:
    return DeviceWedged(f"the device step has not returned within {timeout_s} s")


def _tell(trio_token: trio.lowlevel.TrioToken, event: trio.Event) -> bool:
    """Set an event from outside Trio; return whether Trio still runs."""
    try:
        trio_token.run_sync_soon(event.set)
    except trio.RunFinishedError:
        return False
    return True
