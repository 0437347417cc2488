"""Work in a thread whose errors keep nothing alive. Knows Trio's threads and our errors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from triolet.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def in_thread(
    work: Callable[[], T], limiter: trio.CapacityLimiter, *, abandon_on_cancel: bool = False
) -> T:
    """Return what some work returns, done in a thread.

    An error that is raised out of a thread, or one whose cause was, stays in a circle with Trio's
    frames, which hold what the work was about, bodies of many MiB, until the garbage collector
    comes by: seldom. So a refusal is returned by the thread, and raised here.

    Args:
      work: what to do.
      limiter: of the threads that do such work.
      abandon_on_cancel: whether to leave it to itself when nobody waits any more.

    Raises:
      RequestError: as the work does, without what it came from.
    """
    done = await trio.to_thread.run_sync(
        partial(_result_or_refusal, work), abandon_on_cancel=abandon_on_cancel, limiter=limiter
    )
    if not isinstance(done, RequestError):
        return done
    try:
        raise done
    finally:
        del done  # or the error and this frame would hold one another


def _result_or_refusal(work: Callable[[], T]) -> T | RequestError:
    try:
        return work()
    except RequestError as error:
        error.__context__ = error.__cause__ = None
        return error.with_traceback(None)
