"""Listening to generations until there is something for the reader's own task to do.

What comes meanwhile is taken by whoever serves all streams (Generation.listen), which must not
suffer from one of them: what goes wrong is raised here. Knows no form of answer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

    Listen = Callable[[Callable[[], None] | None], None]


async def listen_until(
    listen: Listen, is_enough: Callable[[], bool], deadline: float = math.inf
) -> bool:
    """Listen until there is reason to stop.

    Args:
      listen: of a generation, or of several.
      is_enough: called whenever there are events; takes them, and says whether to stop.
      deadline: on trio's clock.

    Returns:
      Whether it was enough; False if the deadline came first.

    Raises:
      Exception: whatever `is_enough` raised.
    """
    stopped = trio.Event()
    error: Exception | None = None

    def on_events() -> None:
        nonlocal error
        try:
            if not is_enough():
                return
        except Exception as raised:  # noqa: BLE001 (raised below, in the reader's own task)
            error = raised
        listen(None)
        stopped.set()

    listen(on_events)
    try:
        with trio.move_on_at(deadline):
            await stopped.wait()
    finally:
        listen(None)
    if error is not None:
        raise error
    return stopped.is_set()
