"""Tests of requests whose prompt decode computes itself: all ends, faults and changes of route."""

from __future__ import annotations

from collections import Counter

import pytest

from server.contract.generation import CancelReason
from server.contract.request_events import AttemptFailed
from server.scheduling.request import Phase
from server.scheduling.status import Observer
from transport.frames import EndReason, Grant, Prefill, Reserve, Tokens
from triolet.config import LocalPrefill, RoutingConfig

from .fakes import completion_ids, make_request
from .world import World

ALWAYS = RoutingConfig(LocalPrefill.ALWAYS)


class Routes(Observer):
    """Counts prompts by the worker that computed them."""

    def __init__(self) -> None:
        super().__init__()
        self.routes: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()

    def prompt_routed(self, role: str, why: str) -> None:
        self.routes[f"{role}: {why}"] += 1

    def attempt_failed(self, event: AttemptFailed) -> None:
        self.causes[event.cause] += 1


def world_of(num_prefills: int, num_decodes: int = 1, **config: object) -> tuple[World, Routes]:
    world, routes = World(num_prefills, num_decodes, **config), Routes()
    world.observe(routes)
    world.events.subscribe(AttemptFailed, routes.attempt_failed)
    return world, routes


@pytest.mark.parametrize("routing", [RoutingConfig(), ALWAYS])
def test_a_fleet_without_prefill_answers(routing: RoutingConfig) -> None:
    world, routes = world_of(0, routing=routing)
    readers = [world.submit(make_request(number, seed=number)) for number in range(1, 6)]
    world.settle()
    for number, reader in enumerate(readers, 1):
        assert reader.token_ids == completion_ids(number, 16)
    assert routes.routes.total() == 5
    assert not routes.causes
    world.check_idle()


def test_prefill_gets_nothing_where_decode_computes_always() -> None:
    world, routes = world_of(1, routing=ALWAYS)
    reader = world.submit(make_request())
    world.complete(reader, 16)
    assert not [frame for frame in world.prefill.received if isinstance(frame, Prefill)]
    assert routes.routes == {"decode: always": 1}


@pytest.mark.parametrize("phase", [Phase.RESERVING, Phase.PREFILLING, Phase.DECODING])
def test_a_cancel_is_one_end_to_one_worker(phase: Phase) -> None:
    world, _ = world_of(0)
    reader = world.submit(make_request(max_tokens=100))
    if phase is not Phase.RESERVING:
        world.deliver()
    if phase is Phase.DECODING:
        world.compute(world.worker(world.decode))
        world.deliver()
    assert reader.request.phase is phase
    world.cancel(reader, CancelReason.CLIENT_GONE)
    world.settle()
    assert reader.failed
    world.check_idle()


def test_tokens_that_overtake_their_grant_stand_for_it() -> None:
    world, routes = world_of(0)
    worker = world.worker(world.decode)
    reader = world.submit(make_request(max_tokens=5))
    world.deliver_up(worker)
    grant = world.down[worker].popleft()
    assert isinstance(grant, Grant)
    world.compute(worker)
    world.deliver()
    assert reader.request.phase is Phase.DECODING
    world.hear(worker, grant)
    world.complete(reader, 5)
    assert routes.routes == {"decode: no_prefill": 1}
    assert not routes.causes


def test_a_window_whose_every_row_was_lost_is_said_again() -> None:
    world, routes = world_of(0, token_window=4)
    worker = world.worker(world.decode)
    reader = world.submit(make_request(max_tokens=40))
    world.deliver()
    while world.compute(worker):
        world.down[worker].clear()
    assert reader.request.phase is Phase.PREFILLING
    for _ in range(3):
        world.sweep(world.config.link.heartbeat_interval_s)
    credits = [frame for frame in world.up[worker] if type(frame).__name__ == "TokenCredit"]
    assert credits, "only decode knows, and it was not asked"
    assert not routes.causes


def test_decode_must_not_compute_what_it_was_not_asked_to() -> None:
    world, routes = world_of(1)
    worker = world.worker(world.decode)
    reader = world.submit(make_request())
    [reserve] = [frame for frame in world.up[worker] if isinstance(frame, Reserve)]
    assert reserve.local_tokens == 0
    world.up[worker].clear()
    world.hear(worker, Grant(*reserve.key, epoch=world.decode.epoch, is_local=True))
    assert routes.causes == {"local_unasked": 1}
    world.complete(reader, 16)


def test_a_stream_goes_on_over_prefill_where_decode_had_computed_its_prompt_and_back() -> None:
    world, routes = world_of(1, 2)
    prefill = world.worker(world.prefill)
    world.lose(prefill)
    world.sweep(RoutingConfig().prefill_grace_s)
    reader = world.submit(make_request(max_tokens=60))
    world.deliver()
    for _ in range(5):
        for fake in world.decodes:
            world.compute(world.worker(fake))
        world.deliver()
    world.greet(prefill)
    first = next(worker for worker in world.workers if worker.shares)
    world.lose(first)
    world.deliver()
    assert world.prefill.waiting, "a prefill worker is back"
    world.complete(reader, 60)
    assert routes.routes == {"decode: no_prefill": 1, "prefill: long": 1}
    world.greet(first)
    world.check_idle()


def test_what_kills_prefill_does_not_meet_decode_and_is_convicted() -> None:
    world, _ = world_of(1)
    culprit = world.submit(make_request(1, max_tokens=60))
    for _ in range(2):
        world.deliver()
        assert world.prefill.waiting
        world.lose(world.worker(world.prefill))
        innocent = world.submit(make_request(2, prompt="neu")) if not world.readers[1:] else None
        world.sweep(RoutingConfig().prefill_grace_s)
        world.deliver()
        if innocent is not None:
            assert culprit.request.phase is Phase.QUEUED
            assert innocent.request.phase is Phase.PREFILLING, (
                "it goes first, and decode computes it"
            )
        world.greet(world.worker(world.prefill))
    world.settle()
    assert culprit.failed.error.code == "quarantined"
    assert world.readers[1].token_ids == completion_ids(0, 16)


def test_a_prompt_that_decode_dies_of_is_convicted_like_one_that_prefill_dies_of() -> None:
    world, _ = world_of(0)
    culprit = world.submit(make_request(1, max_tokens=60))
    for _ in range(2):
        world.deliver()
        assert culprit.request.phase is Phase.PREFILLING
        world.restart(world.worker(world.decode))
    world.settle()
    assert culprit.failed.error.code == "quarantined"


def test_a_suspect_does_not_wait_for_ever_for_a_prefill_worker() -> None:
    world, routes = world_of(1)
    reader = world.submit(make_request(1))
    world.deliver()
    world.lose(world.worker(world.prefill))
    world.sweep(RoutingConfig().prefill_grace_s)
    assert reader.request.phase is Phase.QUEUED
    world.sweep(RoutingConfig().suspect_grace_s)
    world.complete(reader, 16)
    assert routes.routes == {"prefill: long": 1, "decode: no_prefill": 1}


def test_decode_that_ends_a_prompt_of_its_own_is_not_a_broken_path() -> None:
    world, routes = world_of(0)
    reader = world.submit(make_request())
    world.deliver()
    [key] = world.decode.rows
    world.hear(world.worker(world.decode), world.decode.end(key, EndReason.ERROR))
    assert len(world.requests.recovery.paths) == 0
    world.complete(reader, 16)
    assert routes.causes == {"error": 1}


def test_without_prefill_and_without_leave_to_do_without_requests_end_in_time() -> None:
    world, _ = world_of(1, routing=RoutingConfig(LocalPrefill.OFF))
    world.lose(world.worker(world.prefill))
    reader = world.submit(make_request())
    world.sweep(world.config.worker_wait_s)
    world.read(reader)
    assert reader.failed.error.code == "no_worker"
    assert not [frame for frame in world.decode.received if isinstance(frame, Tokens)]


def test_whoever_came_to_a_worker_that_stood_still_is_not_what_it_stands_still_by() -> None:
    world, _ = world_of(0)
    early = world.submit(make_request(1, max_tokens=60))
    world.deliver()
    world.now += world.config.link.progress_timeout_s
    late = world.submit(make_request(2, max_tokens=60))
    world.deliver()
    assert late.request.phase is Phase.PREFILLING
    world.lose(world.worker(world.decode), "wedged")
    assert len(early.request.poison.strikes) == 1
    assert len(late.request.poison.strikes) == 0
    world.greet(world.worker(world.decode))
    world.settle()
    for reader in (early, late):
        assert reader.token_ids == completion_ids(0, 60)
    world.check_idle()
