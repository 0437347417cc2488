"""Tests of reading an OutputStream with callbacks: batching, stages, deadlines, and errors raised
in the reader's own task."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest
import trio

from server.api.resume import ResumableAnswer
from server.api.stream import WholeAnswer
from server.contract.generation import CancelReason, Delta, Events, GenerationRequest
from server.contract.output_stream import OutputStream
from tests.server.support.fakes import FakeGeneration
from triolet.config import ResumeConfig
from triolet.sampling import SamplingParams

if TYPE_CHECKING:
    from server.contract.generation import Event

REQUEST = GenerationRequest(b"r", (1,), SamplingParams(max_tokens=2), 1.0)


def a_stream(count: int = 1) -> tuple[OutputStream, list[FakeGeneration]]:
    generations = [FakeGeneration(REQUEST) for _ in range(count)]
    return OutputStream(generations), generations


class Holding:
    """A stage that holds all text back until the end, or raises at one text."""

    def __init__(self, broken_at: str = "") -> None:
        self.given: list[str] = []
        self._held: list[Event] = []
        self._broken_at = broken_at

    def push(self, event: Event) -> list[Event]:
        self.given.append(texts_of(event))
        if self.given[-1] == self._broken_at:
            raise ValueError("of the stage")
        if isinstance(event, Delta):
            self._held.append(event)
            return []
        return [event]

    def finish(self) -> list[Event]:
        return self._held


def texts_of(event: Event) -> str:
    return event.text if isinstance(event, Delta) else "stop"


async def say(generation: FakeGeneration, *texts: str) -> None:
    for text in texts:
        await trio.testing.wait_all_tasks_blocked()
        generation.say(text)


async def test_it_writes_until_something_is_left_and_then_no_more() -> None:
    stream, [generation] = a_stream()
    left: list[str | None] = [None, "rest"]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(say, generation, "a", "b")
        assert await stream.pump(lambda _: left.pop(0)) == "rest"
    assert not left
    generation.say("c")
    await trio.testing.wait_all_tasks_blocked()
    assert generation.num_unread == 1


async def test_events_that_are_there_are_written_at_once_and_an_end_ends_it() -> None:
    stream, [generation] = a_stream()
    generation.say("a")
    generation.finish()
    taken: list[Events] = []
    assert await stream.pump(taken.append) is None
    assert [len(events) for events in taken] == [2]
    assert stream.is_over
    assert [events async for events in stream] == []


async def test_an_error_is_raised_in_the_readers_task() -> None:
    stream, [generation] = a_stream()

    def fail(events: Events) -> None:
        raise ValueError("broken")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(say, generation, "a")
        with pytest.raises(ValueError, match="broken"):
            await stream.pump(fail)
    with trio.move_on_after(0):
        await anext(stream)


async def test_an_error_while_events_are_taken_ends_a_resumable_answer_alone() -> None:
    stream, [generation] = a_stream()

    stream.add_stage(0, Holding(broken_at="a"))
    answer = ResumableAnswer(WholeAnswer(1, lambda _: b""), b"", ResumeConfig(), "demo")
    answer.start(stream)
    generation.say("a")
    await trio.testing.wait_all_tasks_blocked()
    assert answer.ended_at is not None
    assert answer.failure is not None
    assert answer.failure.status == 500
    assert generation.cancelled == [CancelReason.STOPPED]


async def test_stages_change_what_the_next_one_gets_and_give_the_rest_before_the_end() -> None:
    stream, [generation, other] = a_stream(2)
    stream.add_stage(0, Holding())
    stream.add_stage(0, seen := Holding())
    generation.say("a", "b")
    other.say("x")
    assert [(at, texts_of(event)) for at, event in stream.take()] == [(1, "x")]
    generation.finish()
    assert [texts_of(event) for _, event in stream.take()] == ["a", "b", "stop"]
    assert seen.given == ["a", "b", "stop"]


async def test_the_deadline_and_a_cancel_end_the_reading(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stream, [generation] = a_stream()
    taken: list[Events] = []
    assert await stream.pump(taken.append, trio.current_time() + 5) is None
    with trio.move_on_after(1):
        await stream.pump(taken.append)
    generation.say("a")
    await trio.testing.wait_all_tasks_blocked()
    assert not taken
    assert [event.text for _, event in await anext(stream) if isinstance(event, Delta)] == ["a"]


async def test_events_of_all_choices_that_arrive_together_come_at_once() -> None:
    stream, generations = a_stream(3)
    for generation in generations:
        generation.say("a", "b")
    assert [index for index, _ in await anext(stream)] == [0, 0, 1, 1, 2, 2]
    generations[1].finish()
    assert [index for index, _ in await anext(stream)] == [1]
    assert not stream.is_over


async def test_a_stream_whose_choices_are_over_is_freed_unread() -> None:
    """Freed by reference counting: Python's cycle collector runs rarely."""
    stream, [generation] = a_stream()
    generation.finish()
    await trio.testing.wait_all_tasks_blocked()
    seen = weakref.ref(stream), weakref.ref(generation)
    gc.disable()
    try:
        del stream, generation
        await trio.lowlevel.checkpoint()
        assert [one() for one in seen] == [None, None]
    finally:
        gc.enable()
