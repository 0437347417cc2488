"""Advances Trio's MockClock in tests with real sockets, at the moments that the test chooses.

With this clock no deadline expires because the machine is busy. An autojump clock would overtake
data in transit between two sockets.
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
