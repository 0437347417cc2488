"""Tests of work in threads: an error that it raises keeps no object alive."""

from __future__ import annotations

import gc
import threading
import traceback
import weakref
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from server.text.threads import in_thread
from triolet.errors import RequestError, invalid_request

if TYPE_CHECKING:
    from collections.abc import Callable


PATIENCE_S = 60.0


class Body:
    """The object that some work handles."""

    def refuse(self) -> None:
        raise invalid_request("no", "body")

    def refuse_for_a_reason(self) -> None:
        try:
            self.fail()
        except ValueError as error:
            raise invalid_request("no", "body") from error

    def fail(self) -> None:
        raise ValueError


async def refused(refuse: Callable[[Body], None]) -> threading.Event:
    """Run work that refuses a body; return an event that is set when the body is freed."""
    body = Body()
    freed = threading.Event()
    weakref.finalize(body, freed.set)
    was_refused = False
    try:
        await in_thread(partial(refuse, body), trio.CapacityLimiter(1))
    except RequestError:
        was_refused = True
    assert was_refused
    return freed


@pytest.mark.parametrize("refuse", [Body.refuse, Body.refuse_for_a_reason])
async def test_what_was_refused_is_freed_at_once(refuse: Callable[[Body], None]) -> None:
    gc.disable()
    try:
        freed = await refused(refuse)
        # The thread drops it soon after its answer, and Trio's loop in its next turn.
        with trio.fail_after(PATIENCE_S):
            assert await trio.to_thread.run_sync(freed.wait, PATIENCE_S)
    finally:
        gc.enable()


async def test_what_the_thread_keeps_of_a_refusal_holds_nothing_of_its_request() -> None:
    kept = invalid_request("no", "body")

    def refuse() -> None:
        raise kept

    with pytest.raises(RequestError) as caught:
        await in_thread(refuse, trio.CapacityLimiter(1))
    assert caught.value is not kept
    assert caught.value.said == kept.said
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(kept.__traceback__)]
    assert frames == ["_result_or_refusal", "refuse"]


async def test_results_and_other_errors_come_as_they_are() -> None:
    limiter = trio.CapacityLimiter(1)
    assert await in_thread(lambda: 3, limiter) == 3
    with pytest.raises(ValueError, match=r"^$"):
        await in_thread(Body().fail, limiter)
