"""Fake text processes for tests: they run a job in this process, and only when the test releases
it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from server.text.process import outcome_of
from server.text.processes import TextProcesses
from triolet.config import ServerConfig, TurnsConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from server.text.process import Work
    from server.text.processes import _Task


class HeldWork(TextProcesses):
    """Does one job at a time.

    Args:
      text_timeout_s: how long jobs are waited for.
      turns: bounds of the lines.

    Attributes:
      may: has a permit for each job that may be done.
      done: what they were given.
    """

    def __init__(self, *, text_timeout_s: float = 600.0, turns: TurnsConfig | None = None) -> None:
        super().__init__(
            ServerConfig(
                text_processes=1, text_timeout_s=text_timeout_s, turns=turns or TurnsConfig()
            )
        )
        self.may = trio.Semaphore(0)
        self.done: list[tuple[Callable[..., Any], tuple[object, ...]]] = []

    def let_all_go(self) -> None:
        """Let every job be done."""
        for _ in range(100):
            self.may.release()

    async def waits(self, count: int) -> None:
        """Wait until so many jobs have no turn yet."""
        with trio.fail_after(60.0):
            while self.turns.num_waiting < count:
                await trio.lowlevel.checkpoint()

    async def _serve(self, works: Sequence[Work]) -> None:
        del works
        await self._work(self._do_here)

    async def _do_here(self, task: _Task) -> bool:
        await self.may.acquire()
        task.outcome = outcome_of(task.work, task.args)
        self.done.append((task.work, task.args))
        return True


@asynccontextmanager
async def held_work(**settings: Any) -> AsyncIterator[HeldWork]:  # noqa: ANN401
    """Run them."""
    async with trio.open_nursery() as nursery:
        held = HeldWork(**settings)
        await nursery.start(held.run)
        yield held
        nursery.cancel_scope.cancel()
