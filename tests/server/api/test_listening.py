"""Listening: what goes wrong with one stream is its own reader's, never of who serves all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from server.api.stream import Choices, listen_until
from server.contract.generation import GenerationRequest
from tests.server.support.fakes import FakeGeneration
from triolet.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable


class Source:
    """Calls whoever listens when a test says so."""

    def __init__(self) -> None:
        self.on_events: Callable[[], None] | None = None

    def listen(self, on_events: Callable[[], None] | None) -> None:
        self.on_events = on_events

    async def fire(self) -> None:
        while self.on_events is None:
            await trio.lowlevel.checkpoint()
        self.on_events()


async def test_it_listens_until_it_is_enough_and_then_no_more() -> None:
    source = Source()
    answers = [False, True]
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(source.fire)
        assert await listen_until(source.listen, lambda: answers.pop(0))
    assert source.on_events is None
    assert not answers


async def test_an_error_is_raised_in_the_readers_task() -> None:
    source = Source()

    def fail() -> bool:
        raise ValueError("broken")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(source.fire)  # the one who serves all: not struck
        with pytest.raises(ValueError, match="broken"):
            await listen_until(source.listen, fail)
    assert source.on_events is None


async def test_the_deadline_and_a_cancel_end_the_listening(
    autojump_clock: trio.testing.MockClock,
) -> None:
    source = Source()
    assert not await listen_until(source.listen, lambda: True, trio.current_time() + 5)
    assert source.on_events is None
    with trio.move_on_after(1):
        await listen_until(source.listen, lambda: True)
    assert source.on_events is None


async def test_a_choice_that_is_over_holds_no_listener_any_more() -> None:
    params = SamplingParams(max_tokens=2)
    over, under_way = (FakeGeneration(GenerationRequest(b"r", (1,), params, 1.0)) for _ in range(2))
    choices = Choices([over, under_way])
    choices.listen(lambda: None)
    over.finish()
    assert [index for index, _ in choices.take_now()] == [0]
    assert not over.has_listener
    assert under_way.has_listener
