"""Time that passes when a test says so, beside real sockets.

With trio's MockClock no deadline comes nearer while the machine is busy; unlike a clock that jumps
by itself, it does not overtake what is under way between two sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio.testing import wait_all_tasks_blocked

if TYPE_CHECKING:
    from trio.testing import MockClock

UNDER_WAY_S = 0.005
"""Real time without anything to do after which nothing is under way on loopback any more."""


async def pass_time(clock: MockClock, seconds: float) -> None:
    """Let time pass once everybody has done what there was to do."""
    await wait_all_tasks_blocked(UNDER_WAY_S)
    clock.jump(seconds)
