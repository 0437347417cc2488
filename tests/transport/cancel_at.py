"""Test helper that runs a coroutine repeatedly and cancels it at its first, second, … k-th step."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import trio
from trio.abc import Instrument

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MAX_STEPS = 10_000


class Moment(Enum):
    """When the cancellation arrives."""

    ASLEEP = "asleep"  # just after the task started to wait
    WAKING = "waking"  # after the event that it waited for, before it runs


class _CancelAt(Instrument):
    def __init__(self, step: int, moment: Moment) -> None:
        self.scope = trio.CancelScope()
        self.task: trio.lowlevel.Task | None = None
        self.has_struck = False
        self._step = step
        self._moment = moment
        self._seen = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._moment is Moment.WAKING:
            self._count(task)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._moment is Moment.ASLEEP:
            self._count(task)

    def _count(self, task: trio.lowlevel.Task) -> None:
        if task is self.task and not self.has_struck:
            if self._seen == self._step:
                self.has_struck = True
                self.scope.cancel()
            self._seen += 1


async def run_cancelled_at(
    step: int, moment: Moment, victim: Callable[[], Awaitable[None]]
) -> bool:
    """Run `victim` in the calling task and cancel it at its k-th step.

    Returns:
        Whether it had that many steps; False means that it finished undisturbed.
    """
    assert step < MAX_STEPS, "the scenario never ends"
    instrument = _CancelAt(step, moment)
    trio.lowlevel.add_instrument(instrument)
    try:
        with instrument.scope:
            instrument.task = trio.lowlevel.current_task()
            await victim()
            instrument.task = None
    finally:
        trio.lowlevel.remove_instrument(instrument)
    return instrument.has_struck
