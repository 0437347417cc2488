"""Run Trio deterministically from a seed: virtual time, a fixed order of tasks, and simulated
processes that can be stopped like with SIGSTOP.

This file and clock.py rely on Trio's internals. This one uses the switch and the random generator
for shuffling runnable tasks (trio._core._run), and replaces a task's coroutine when it is spawned.
tests/simulation/test_deterministic.py checks them for the pinned version.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import trio
from trio._core import _run as scheduler

from .clock import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableSequence
    from types import FrameType

T = TypeVar("T")


class ProcessGate:
    """Stops and continues all tasks of one simulated process.

    A stopped task finishes its current step and starts no other one. Its wake-ups are kept. Time,
    deadlines and messages continue, as for a process after SIGSTOP.
    """

    def __init__(self) -> None:
        self._is_open = True
        self._held: list[trio.lowlevel.Task] = []

    @property
    def is_open(self) -> bool:
        """Return whether its tasks run."""
        return self._is_open

    def close(self) -> None:
        """Stop. Idempotent."""
        self._is_open = False

    def open(self) -> None:
        """Continue. Idempotent."""
        self._is_open = True
        held, self._held = self._held, []
        for task in held:
            trio.lowlevel.reschedule(task)

    def hold(self, task: trio.lowlevel.Task) -> None:
        """Keep a task that was about to run; opening the gate reschedules it."""
        self._held.append(task)


_GATE: ContextVar[ProcessGate | None] = ContextVar("gate", default=None)


@contextmanager
def behind(gate: ProcessGate) -> Iterator[None]:
    """Put every task that is spawned in this block, and its children, behind a gate."""
    token = _GATE.set(gate)
    try:
        yield
    finally:
        _GATE.reset(token)


class _Resumption(NamedTuple):
    """The value or error with which a held task is resumed."""

    resume: Callable[[Any], object]
    value: object


class _GatedCoroutine:
    """A coroutine that continues only while its gate is open."""

    def __init__(
        self, inner: Coroutine[Any, Any, object], task: trio.lowlevel.Task, gate: ProcessGate
    ) -> None:
        self._inner = inner
        self._task = task
        self._gate = gate
        self._held: _Resumption | None = None

    def send(self, value: object) -> object:
        if self._gate.is_open and self._held is None:
            return self._inner.send(value)
        return self._resume(_Resumption(self._inner.send, value))

    def throw(self, error: BaseException) -> object:
        return self._resume(_Resumption(self._inner.throw, error))

    def close(self) -> None:
        self._inner.close()

    @property
    def cr_frame(self) -> FrameType | None:
        """Let Trio see the frames of the real coroutine."""
        return self._inner.cr_frame  # type: ignore[attr-defined,no-any-return]

    @property
    def cr_await(self) -> object:
        """See cr_frame."""
        return self._inner.cr_await  # type: ignore[attr-defined]

    def _resume(self, resumption: _Resumption) -> object:
        # A held task is rescheduled without a value; it got its value earlier.
        resumption = self._held or resumption
        if self._gate.is_open:
            self._held = None
            return resumption.resume(resumption.value)
        self._held = resumption
        self._gate.hold(self._task)
        return _park()


def _park() -> object:
    """Return the trap that lets a task sleep until it is rescheduled, without cancellation."""
    sleep = trio.lowlevel.wait_task_rescheduled
    waiting = sleep(lambda _: trio.lowlevel.Abort.FAILED)
    trap = waiting.send(None)
    waiting.close()
    return trap


class _Gatekeeper(trio.abc.Instrument):
    """Puts each new task behind the gate of the context that spawned it."""

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        gate = task.context.get(_GATE)
        if gate is not None:
            task.coro = _GatedCoroutine(task.coro, task, gate)  # type: ignore[assignment]


class _Shuffler(random.Random):
    """Replacement of Trio's random generator; draws nothing if there is only one task."""

    def shuffle(self, x: MutableSequence[Any]) -> None:
        if len(x) > 1:
            super().shuffle(x)


def run(main: Callable[[], Awaitable[T]], seed: int) -> T:
    """Run an async function in virtual time, with the order of tasks determined by the seed.

    The function needs a deadline, because a deadlock of tasks would never end.
    """
    generator = scheduler._r
    was_deterministic = scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    scheduler._r = _Shuffler(seed)
    clock = VirtualClock()
    try:
        with clock.rules():
            return trio.run(main, clock=clock, instruments=[_Gatekeeper()])
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = was_deterministic  # type: ignore[misc]
        scheduler._r = generator
