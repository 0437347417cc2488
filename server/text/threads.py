"""Runs work in a thread without keeping request data alive after an error."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import trio

from triolet.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def in_thread(work: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
    """Return the result of work done in a thread.

    An exception raised from a thread, or with such a cause, forms a reference cycle with Trio's
    frames, which hold the work's data, bodies of many MiB, until the rare garbage collection. The
    thread also keeps its last result until it runs again, possibly much later, and a raised error
    would keep its request. So the thread returns the arguments of a RequestError, and the error is
    created here.

    Args:
      work: the work.
      limiter: limits the number of threads for such work.

    Raises:
      RequestError: as the work does, without its cause.
    """
    done = await trio.to_thread.run_sync(partial(_result_or_refusal, work), limiter=limiter)
    if isinstance(done, _Refusal):
        raise RequestError(**done.said)
    return done


class _Refusal(NamedTuple):
    """The arguments of a RequestError.

    Attributes:
      said: the arguments by name.
    """

    said: dict[str, Any]


def _result_or_refusal(work: Callable[[], T]) -> T | _Refusal:
    try:
        return work()
    except RequestError as error:
        return _Refusal(error.said)
