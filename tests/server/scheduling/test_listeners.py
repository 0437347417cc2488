"""Tests of streams that are read with a callback: it is called once per frame, and not after
detaching."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import pytest
import trio

from server.contract.generation import CancelReason, Delta, Failed, Finished
from server.scheduling import delivery
from triolet.service_class import Scheduling

from .fakes import completion_ids, make_request
from .test_fleet import read_all, running

if TYPE_CHECKING:
    from trio.testing import MockClock

    from server.contract.generation import Event, Events
    from server.scheduling.delivery import RequestOutput


async def test_who_listens_is_called_once_for_what_came_together(
    autojump_clock: MockClock,
) -> None:
    async with running() as cluster:
        streams = [cluster.fleet.submit(make_request(number)) for number in range(3)]
        taken: list[list[Event]] = [[] for _ in streams]
        calls = 0
        over = trio.Event()

        def take(number: int, events: Events) -> None:
            nonlocal calls
            calls += 1
            assert events, "called without events"
            taken[number] += [event for _, event in events]
            if all(t and isinstance(t[-1], Finished | Failed) for t in taken):
                over.set()

        for number, stream in enumerate(streams):
            stream.listen(partial(take, number))
            with pytest.raises(trio.BusyResourceError):
                await anext(stream)
        await over.wait()
        tokens = [
            [i for event in events if isinstance(event, Delta) for i in event.token_ids]
            for events in taken
        ]
        assert tokens == [completion_ids(0, len(of_one)) for of_one in tokens]
        assert calls <= sum(map(len, tokens))
        assert all(stream.is_over for stream in streams)


async def test_who_stops_listening_is_called_no_more_and_may_wait_again(
    autojump_clock: MockClock,
) -> None:
    async with running() as cluster:
        stream = cluster.fleet.submit(make_request(max_tokens=40))
        assert stream.take() == []
        token_ids: list[int] = []
        heard = trio.Event()

        def take_one(events: Events) -> None:
            for _, event in events:
                assert isinstance(event, Delta)
                token_ids.extend(event.token_ids)
            stream.listen(None)
            heard.set()

        stream.listen(take_one)
        await heard.wait()
        rest, _ = await read_all(stream)
        assert token_ids + rest == completion_ids(0, 40)


ROWS_OF_A_TURN = 16
"""Fewer than in production, because a fake worker has few rows."""


async def test_a_neighbours_token_waits_for_one_turn_and_not_for_a_crowds_frame(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "ROWS_PER_TURN", ROWS_OF_A_TURN, raising=False)
    crowd, neighbour = Scheduling(tenant="crowd"), Scheduling(tenant="neighbour")
    async with running() as cluster:
        cluster.decode.row_credit = 100
        await trio.sleep(1.0)
        streams = [
            cluster.fleet.submit(make_request(number, max_tokens=40, scheduling=crowd))
            for number in range(1, 61)
        ]
        late = cluster.fleet.submit(make_request(61, max_tokens=40, scheduling=neighbour))
        held: list[int] = []
        handed = 0
        over = trio.Event()

        def take(events: Events) -> None:
            nonlocal handed
            for _, event in events:
                handed += len(event.token_ids) if isinstance(event, Delta) else 0

        def take_late(events: Events) -> None:
            outputs = [cast("RequestOutput", stream.generations[0]) for stream in streams]
            held.append(sum(len(one.running.relay.token_ids) for one in outputs) - handed)
            if any(isinstance(event, Finished) for _, event in events):
                over.set()

        for stream in streams:
            stream.listen(take)
        late.listen(take_late)
        await over.wait()
        assert len(held) > 20
        assert max(held) <= ROWS_OF_A_TURN
        await trio.sleep(1.0)
        assert handed == 60 * 40


async def test_the_error_of_a_listener_that_has_stopped_listening_is_told_to_it_alone(
    autojump_clock: MockClock,
) -> None:
    """Otherwise it would end the task that delivers to all streams."""
    async with running() as cluster:
        stream, other = (cluster.fleet.submit(make_request(number)) for number in range(2))
        told: list[Exception] = []

        def take(events: Events) -> None:
            stream.listen(None)
            raise ValueError(events)

        stream.listen(take, told.append)
        assert isinstance((await read_all(other))[-1], Finished)
        assert len(told) == 1
        stream.cancel(CancelReason.STOPPED)
