"""Tests of golden prompts: on fake workers in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from server.rollouts.golden import PROMPTS, golden_answers
from tests.server.scheduling import fakes
from tests.server.scheduling.fakes import make_request
from tests.server.scheduling.test_fleet import Cluster, read_all, running
from tests.server.tiny_text import tiny_text
from transport.frames import End, RefuseReason, Reserve
from transport.tokens import unpack_tokens
from triolet.config import CandidateConfig
from triolet.errors import RequestError
from triolet.service_class import Scheduling, ServiceClass

if TYPE_CHECKING:
    from trio.testing import MockClock

CONFIG = CandidateConfig()
ENCODE = tiny_text().encode


def reserves(cluster: Cluster) -> list[Reserve]:
    return [one for one in cluster.decode.received if isinstance(one, Reserve)]


async def test_equal_models_answer_equally_and_others_do_not(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as one, running() as other:
        first = await golden_answers(one.fleet, ENCODE, CONFIG)
        assert len(first) == len(PROMPTS)
        assert await golden_answers(one.fleet, ENCODE, CONFIG) == first, "each time"
        assert await golden_answers(other.fleet, ENCODE, CONFIG) == first
        monkeypatch.setattr(fakes, "STORY", fakes.STORY.replace("ü", "u"))
        second = await golden_answers(one.fleet, ENCODE, CONFIG)
        assert all(a != b for a, b in zip(first, second, strict=True))


async def test_they_are_greedy_in_the_highest_class_and_one_at_a_time(
    autojump_clock: MockClock,
) -> None:
    async with running() as cluster:
        await golden_answers(cluster.fleet, ENCODE, CONFIG)
        await trio.sleep(0.1)
        sent = [one for one in cluster.decode.received if isinstance(one, Reserve | End)]
        assert [type(one) for one in sent] == [Reserve, End] * len(PROMPTS)
        highest = Scheduling(service_class=ServiceClass.CRITICAL).rank(0)
        for text, reserve in zip(PROMPTS, reserves(cluster), strict=True):
            assert bytes(unpack_tokens(reserve.prompt)).decode() == text
            assert reserve.priority == highest
            assert (reserve.sampling.temperature, reserve.sampling.seed) == (0.0, 0)
            assert reserve.sampling.max_tokens == CONFIG.golden_tokens
        assert len({reserve.salt for reserve in reserves(cluster)}) == len(PROMPTS)


async def test_a_hung_candidate_is_named_with_the_deadline(autojump_clock: MockClock) -> None:
    async with running() as cluster:
        cluster.decode_process.is_held = True
        began_at = trio.current_time()
        with pytest.raises(RequestError, match="did not finish within its 2 s"):
            await golden_answers(cluster.fleet, ENCODE, CandidateConfig(golden_deadline_s=2.0))
        assert trio.current_time() - began_at < 3.0
        cluster.decode_process.is_held = False


async def test_a_refusal_is_an_error(autojump_clock: MockClock) -> None:
    async with running() as cluster:
        cluster.decode.refusal = RefuseReason.TOO_LONG
        with pytest.raises(RequestError, match="exceed what a worker can hold"):
            await golden_answers(cluster.fleet, ENCODE, CONFIG)


async def test_a_cancelled_prompt_leaves_nothing(autojump_clock: MockClock) -> None:
    async with running() as cluster:
        cluster.decode_process.is_held = True
        with trio.move_on_after(0.5):
            await golden_answers(cluster.fleet, ENCODE, CONFIG)
        assert cluster.fleet.status().running == 0
        cluster.decode_process.is_held = False


async def test_a_drain_does_not_wait_for_silent_requests(autojump_clock: MockClock) -> None:
    async with running() as cluster, trio.open_nursery() as nursery:
        user = cluster.fleet.submit(make_request(max_tokens=200))

        async def ask() -> None:
            with pytest.raises(RequestError):
                await golden_answers(cluster.fleet, ENCODE, CandidateConfig(golden_tokens=1000))

        nursery.start_soon(ask)
        await trio.sleep(0.5)
        assert cluster.fleet.status().running == 2
        assert cluster.fleet.in_flight() == 1, "caps count clients' requests"
        nursery.start_soon(cluster.fleet.drain)
        await trio.sleep(0.001)
        assert cluster.fleet.status().running == 1
        token_ids, _ = await read_all(user)
        assert len(token_ids) == 200
