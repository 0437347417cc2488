"""Run blocking device calls from Trio on one dedicated thread.

Calls run one at a time, in order. A call that has started is always awaited, even when its caller
is cancelled: it may be writing KV blocks, which must not count as free before it returns.
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
    """The thread's state.

    Attributes:
      steps: finished calls; heartbeats report it as progress.
      busy_since: Trio time at which the running call started; None when idle.
      waiting: accepted calls that have not started.
    """

    steps: int
    busy_since: float | None
    waiting: int


class DeviceThread:
    """Runs blocking calls on one dedicated thread.

    An async context manager: the thread starts on entry and ends on exit.

    Args:
      max_waiting: calls queued behind the running one; further callers wait in Trio, where they can
        be cancelled.
      num_threads: CPU threads of torch's kernels; None for torch's default.
      close_timeout_s: how long a cancelled caller, or exit, waits for the running call.
      niceness: niceness added to the thread and the threads that its kernels start.
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
        # A daemon, so that a wedged kernel cannot keep the process from exiting.
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
        """Run `fn(*args)` on the device thread and return its result.

        Cancellation takes effect at once while waiting for a queue slot. Later, the call runs to
        its end first.

        Raises:
          LocalProtocolError: the thread is closed.
          DeviceWedged: cancelled, and the call did not end within `close_timeout_s`.
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
        """Refuse new calls and wait until accepted ones have run. Idempotent.

        Raises:
          DeviceWedged: they did not end within `timeout_s`. The thread still uses the pool, so the
            process must exit.
        """
        if not self._is_closing:
            self._is_closing = True
            self._jobs.put_nowait(None)
        with trio.move_on_after(timeout_s, shield=True):
            await self._stopped.wait()
        if not self._stopped.is_set():
            raise _wedged(timeout_s)

    def statistics(self) -> DeviceStatistics:
        """Return the thread's state, without waiting."""
        return DeviceStatistics(self._steps, self._busy_since, self._jobs.qsize())

    def _work(self, trio_token: trio.lowlevel.TrioToken, clock: trio.abc.Clock) -> None:
        if self._niceness:
            # Linux has a niceness per thread. Relative, because an inherited value must not be
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
    """Set an event from outside Trio. Return whether Trio is still running."""
    try:
        trio_token.run_sync_soon(event.set)
    except trio.RunFinishedError:
        return False
    return True
