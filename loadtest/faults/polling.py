"""The one place that waits by looking again and again: for what tells nobody when it changes."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

POLL_S = 0.005


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Return once the condition holds. Bound it by a deadline."""
    while True:
        held = condition()
        if inspect.isawaitable(held):
            held = await held
        if held:
            return
        await trio.sleep(POLL_S)
