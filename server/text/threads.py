"""Work in a thread, whose refusals keep nothing alive."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import trio

from triolet.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def in_thread(work: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
    """Return what some work returns, done in a thread.

    An error that is raised out of a thread, or one whose cause was, stays in a circle with Trio's
    frames, which hold what the work was about, bodies of many MiB, until the garbage collector
    comes by: seldom. The thread itself keeps what it returns until it runs again, on a busy machine
    long after; an error that is raised here would meanwhile keep its request. So the thread returns
    what a refusal says, and the refusal is made here.

    Args:
      work: what to do.
      limiter: of the threads that do such work.

    Raises:
      RequestError: as the work does, without what it came from.
    """
    done = await trio.to_thread.run_sync(partial(_result_or_refusal, work), limiter=limiter)
    if isinstance(done, _Refusal):
        raise RequestError(**done.said)
    return done


class _Refusal(NamedTuple):
    """What a RequestError says.

    Attributes:
      said: its arguments.
    """

    said: dict[str, Any]


def _result_or_refusal(work: Callable[[], T]) -> T | _Refusal:
    try:
        return work()
    except RequestError as error:
        return _Refusal(error.said)
