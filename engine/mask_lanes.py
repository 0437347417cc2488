"""Threads that compute token masks: a quick lane, and a slow one for sequences with costly masks.

A mask computation cannot be cancelled. A thread whose mask exceeds the time limit is replaced by a
new one and ends when the mask is done. Callers submit their waiting masks again.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import structlog

from .batch import Barred

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from triolet.config import MaskConfig

    from .batch import Mask

log = structlog.get_logger()


def thread_clock() -> Callable[[], float]:
    """Return a clock of the calling thread's processor time [s], readable from any thread."""
    return partial(time.clock_gettime, time.pthread_getcpuclockid(threading.get_ident()))


class Masked(Protocol):
    """Computes the masks of one sequence."""

    def compute(self, output_ids: list[int], clock: Callable[[], float]) -> Mask | Barred:
        """Return the next mask; `clock` returns the thread's processor time [s]."""
        ...

    def condemn(self) -> None:
        """Stop computing masks for this sequence."""
        ...


class _Running(NamedTuple):
    """A mask being computed.

    Attributes:
      masked: what computes it.
      clock: processor time of its thread.
      began_s: start time on that clock.
      thread: kernel id of its thread.
    """

    masked: Masked
    clock: Callable[[], float]
    began_s: float
    thread: int


class Lane:
    """One thread with a FIFO queue of masks.

    Args:
      name: name of the thread.
      config: bounds.
      niceness: niceness added to the process's.
      new_clock: returns the calling thread's clock of processor time.

    Attributes:
      generation: rises when the thread is replaced; masks queued for the old one never start.
    """

    def __init__(
        self,
        name: str,
        config: MaskConfig,
        niceness: int = 0,
        new_clock: Callable[[], Callable[[], float]] = thread_clock,
    ) -> None:
        self._name = name
        self._config = config
        self._niceness = niceness
        self._new_clock = new_clock
        self._running: _Running | None = None
        self._stragglers: list[Future[int]] = []
        self.generation = 0
        self._threads = self._new_threads()

    def prepare(self) -> None:
        """Start the thread."""
        self._threads.submit(int)

    def submit(self, masked: Masked, output_ids: list[int]) -> Future[Mask | Barred]:
        """Queue a mask."""
        return self._threads.submit(self._compute, masked, output_ids, self.generation)

    def relieve(self) -> None:
        """Replace the thread if its mask exceeds the time limit."""
        running = self._running
        if running is None:
            return
        if running.clock() - running.began_s <= self._config.mask_cpu_s:
            return
        running.masked.condemn()
        self._stragglers = [one for one in self._stragglers if not one.done()]
        if len(self._stragglers) >= self._config.max_stragglers:
            return
        log.warning("mask_thread_replaced", thread=self._name, stragglers=len(self._stragglers) + 1)
        _stand_back(running.thread, self._config.straggler_niceness)
        left, self._running = self._threads, None
        self.generation += 1
        self._threads = self._new_threads()
        self.prepare()
        self._stragglers.append(left.submit(int))  # done when the mask is
        left.shutdown(wait=False)

    def _new_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, self._name, _begin_thread, (self._niceness,))

    def _compute(self, masked: Masked, output_ids: list[int], generation: int) -> Mask | Barred:
        if generation != self.generation:
            return Barred.LATE
        clock = self._new_clock()
        running = _Running(masked, clock, clock(), threading.get_native_id())
        self._running = running
        try:
            return masked.compute(output_ids, clock)
        finally:
            if self._running is running:
                self._running = None


class Lanes:
    """The lanes of one worker.

    Args:
      config: bounds.
      new_clock: returns the calling thread's clock of processor time.
    """

    def __init__(
        self, config: MaskConfig, new_clock: Callable[[], Callable[[], float]] = thread_clock
    ) -> None:
        self.quick = Lane("masks", config, 0, new_clock)
        self.slow = Lane("slow_masks", config, config.slow_niceness, new_clock)

    def prepare(self) -> None:
        """Start the threads."""
        self.quick.prepare()
        self.slow.prepare()


def _begin_thread(niceness: int) -> None:
    _stand_back(threading.get_native_id(), niceness)


def _stand_back(thread: int, niceness: int) -> None:
    """Raise a thread's niceness; the kernel clamps it to the highest."""
    if niceness:
        own = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, own + niceness)
