"""Tests of several completions of one prompt: they share one prefill and one decode worker, then
diverge."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from server.contract.generation import CancelReason
from transport.frames import EndReason, Prefill, RefuseReason, Reserve
from triolet.config import LocalPrefill, RoutingConfig
from triolet.errors import RequestError

from .fakes import completion_ids, make_request
from .world import World

if TYPE_CHECKING:
    from server.contract.generation import GenerationRequest

    from .world import Reader

OFF = RoutingConfig(LocalPrefill.OFF)


def choices(
    count: int, *, max_tokens: int = 16, first: int = 1, priority: int = 0
) -> list[GenerationRequest]:
    """Return requests for several completions of one prompt, each with its own seed."""
    requests = [
        make_request(first + n, seed=n, max_tokens=max_tokens, priority=priority)
        for n in range(count)
    ]
    return [requests[0], *(replace(r, origin_id=requests[0].request_id) for r in requests[1:])]


def reserved(world: World, index: int = 0) -> list[Reserve]:
    return [frame for frame in world.decodes[index].received if isinstance(frame, Reserve)]


def check_answers(readers: list[Reader], max_tokens: int = 16) -> None:
    for seed, reader in enumerate(readers):
        assert reader.token_ids == completion_ids(seed, max_tokens)


@pytest.mark.parametrize("routing", [OFF, RoutingConfig(), RoutingConfig(LocalPrefill.ALWAYS)])
def test_several_completions_need_one_prefill(routing: RoutingConfig) -> None:
    world = World(num_decodes=3, routing=routing)
    readers = world.submit_together(choices(5))
    world.settle()
    check_answers(readers)
    asked = [frame for frame in world.prefill.received if isinstance(frame, Prefill)]
    assert len(asked) == (routing.local_prefill is not LocalPrefill.ALWAYS)
    assert [len(reserved(world, i)) for i in range(3)].count(5) == 1, "all at one worker"
    world.check_idle()


def test_a_fork_takes_little_of_its_worker() -> None:
    world = World(routing=OFF)
    world.announce(world.decode, num_blocks=10)
    requests = [replace(r, prompt_ids=tuple(range(1, 18))) for r in choices(3, max_tokens=2)]
    readers = world.submit_together(requests)
    world.deliver()
    assert world.decode.free_blocks == 10 - 5 - 1 - 1
    assert len(world.decode.rows) == 3
    world.settle()
    check_answers(readers, 2)
    world.check_idle()


def test_where_there_is_no_room_a_completion_goes_its_own_way() -> None:
    world = World(num_decodes=2, routing=OFF)
    for decode in world.decodes:
        world.announce(decode, row_credit=2)
    readers = world.submit_together(choices(4))
    world.settle()
    check_answers(readers)
    assert [len(reserved(world, i)) for i in range(2)] == [2, 2]
    world.check_idle()


@pytest.mark.parametrize("num_steps", range(4))
@pytest.mark.parametrize("leaver", range(3))
def test_each_may_leave_at_any_time(num_steps: int, leaver: int) -> None:
    world = World(routing=OFF)
    readers = world.submit_together(choices(3))
    for _ in range(num_steps):
        for worker in world.workers:
            world.compute(worker)
        world.deliver()
    world.cancel(readers[leaver], CancelReason.CLIENT_GONE)
    world.settle()
    for seed, reader in enumerate(readers):
        if seed == leaver:
            assert reader.failed
        else:
            assert reader.token_ids == completion_ids(seed, 16)
    world.check_idle()


@pytest.mark.parametrize("num_steps", range(6))
def test_a_lost_decode_worker_costs_no_token_of_any(num_steps: int) -> None:
    world = World(num_decodes=2, routing=OFF)
    readers = world.submit_together(choices(4))
    for _ in range(num_steps):
        for worker in world.workers:
            world.compute(worker)
        world.deliver()
        for reader in readers:
            world.read(reader)
    world.lose(world.worker(world.decodes[0]))
    world.settle()
    check_answers(readers)
    world.check_idle()


def test_a_preempted_origin_takes_its_forks_along() -> None:
    world = World(routing=OFF)
    readers = world.submit_together(choices(3))
    world.deliver()
    worker = world.worker(world.decode)
    key = reserved(world)[0].key
    ended = world.decode.end(key, EndReason.PREEMPTED)
    for frame in [ended, *world.decode.step()]:
        world.hear(worker, frame)
    world.settle()
    check_answers(readers)
    assert all(reader.request.num_attempts == 2 for reader in readers)
    world.check_idle()


def test_who_finds_no_origin_any_more_is_not_asked_to_share_again() -> None:
    world = World(routing=OFF)
    readers = world.submit_together(choices(2))
    worker = world.worker(world.decode)
    world.deliver_up(worker)
    lost = world.decode.rows.pop(reserved(world)[0].key)
    world.deliver_up(worker)
    refused = world.down[worker][-1]
    assert getattr(refused, "reason", None) is RefuseReason.NO_FORK
    world.decode.rows[lost.reserve.key] = lost
    world.settle()
    check_answers(readers)
    assert [frame.fork_of is None for frame in reserved(world)] == [True, False, True]
    world.check_idle()


def test_all_are_taken_or_none() -> None:
    world = World(routing=OFF, max_queued_requests=4)
    world.announce(world.decode, row_credit=0)
    world.submit_together(choices(2))
    with pytest.raises(RequestError, match="wait already") as refusal:
        world.submit_together(choices(4, first=10))
    assert refusal.value.is_crowded_out
    assert world.requests.num_queued == 2
    assert world.requests.table.accounting.rejected["overloaded"] == 4
    world.submit_together(choices(2, first=20))
    world.check_accounting()


def test_a_completion_among_several_that_can_never_fit_refuses_all() -> None:
    world = World()
    requests = choices(3)
    requests[2] = replace(requests[2], prompt_ids=tuple(range(5000)))
    with pytest.raises(RequestError) as caught:
        world.submit_together(requests)
    assert caught.value.code == "context_length_exceeded"
    assert world.requests.num_in_flight == 0
    world.check_accounting()
