"""Tests of one request with many embedding inputs: how much is done per turn of the event loop."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import trio

from server.contract.generation import CancelReason, input_request
from triolet.errors import RequestError
from triolet.pooling import VectorForm

from .test_fleet import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio.testing import MockClock

    from server.contract.generation import GenerationRequest
    from server.scheduling.links import Links

NUM_INPUTS = 512
MOST_AT_ONCE = 64
"""Twice what one task does before yielding: the turns of two tasks may come in any order."""


def many(count: int = NUM_INPUTS, first: int = 0) -> Iterator[GenerationRequest]:
    for number in range(first, first + count):
        yield input_request(number.to_bytes(16, "big"), (5,), VectorForm(), 600.0)


class Turns:
    """Checks a fleet in every turn of the event loop.

    Attributes:
      accepted: number of accepted inputs, per turn.
      ended: number of ended inputs, per turn.
    """

    def __init__(self, fleet: Links) -> None:
        self._fleet = fleet
        self.accepted: list[int] = []
        self.ended: list[int] = []

    async def watch(self) -> None:
        while True:
            status = self._fleet.status()
            self.accepted.append(status.accepted)
            self.ended.append(sum(status.ended.values()))
            await trio.lowlevel.checkpoint()

    def check(self) -> None:
        """Assert that other tasks had their turns."""
        for counts in (self.accepted, self.ended):
            assert max(after - before for before, after in pairwise(counts)) <= MOST_AT_ONCE


async def until_watched(turns: Turns, num_accepted: int) -> None:
    while not turns.accepted or turns.accepted[-1] < num_accepted:
        await trio.lowlevel.checkpoint()


@pytest.mark.slow
async def test_many_inputs_of_one_request_begin_and_end_some_at_a_time(
    autojump_clock: MockClock,
) -> None:
    autojump_clock.rate = 1.0
    async with running() as cluster:
        turns = Turns(cluster.fleet)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(turns.watch)
            await until_watched(turns, 0)
            vectors = await cluster.fleet.embed(list(many())).vectors()
            nursery.cancel_scope.cancel()
        assert len(vectors) == NUM_INPUTS
        assert all(vectors)
        turns.check()
        cluster.check_idle()


@pytest.mark.slow
async def test_a_client_that_leaves_many_inputs_behind_holds_nobody_up(
    autojump_clock: MockClock,
) -> None:
    autojump_clock.rate = 1.0
    async with running() as cluster:
        cluster.prefill_process.is_held = True
        turns = Turns(cluster.fleet)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(turns.watch)
            await until_watched(turns, 0)
            run = cluster.fleet.embed(list(many()))
            waiting = trio.CancelScope()

            async def wait() -> None:
                with waiting:
                    await run.vectors()

            nursery.start_soon(wait)
            await until_watched(turns, NUM_INPUTS)
            waiting.cancel()
            run.cancel(CancelReason.CLIENT_GONE)
            while turns.ended[-1] < NUM_INPUTS:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        turns.check()
        cluster.check_idle()


async def test_a_request_of_which_one_input_is_refused_begins_nothing(
    autojump_clock: MockClock,
) -> None:
    async with running() as cluster:
        too_long = (5,) * (cluster.fleet.max_model_len + 1)
        last = input_request(b"last".rjust(16), too_long, VectorForm(), 600.0)
        with pytest.raises(RequestError, match="this model takes at most"):
            cluster.fleet.embed([*many(MOST_AT_ONCE), last])
        assert cluster.fleet.status().accepted == 0
