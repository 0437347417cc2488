"""Tests of requests suspected of crashing workers: run together, then isolated, then refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace as replace_frame

from server.contract.generation import input_request
from server.scheduling.request import Phase
from transport.frames import EndReason
from transport.liveness import PeerEvent
from triolet.errors import RequestError
from triolet.ids import LIVES, Role
from triolet.pooling import VectorForm
from triolet.sampling import Grammar, GrammarKind
from triolet.service_class import Scheduling

from .fakes import LINK, completion_ids, make_request
from .stages import fail_step
from .world import World

if TYPE_CHECKING:
    from server.contract.generation import GenerationRequest
    from server.scheduling.workers import Worker


def test_suspects_meet_again_and_isolated_ones_do_not() -> None:
    world = World(num_decodes=2)
    first, other = world.decodes
    world.worker(other).busy_until = world.now + 1e9
    readers = [world.submit(make_request(number, max_tokens=60)) for number in (1, 2, 3)]
    for _ in range(2):
        world.deliver()
        while world.compute(world.worker(world.prefill)):
            world.deliver()
        assert len(first.rows) == 3
        world.lose(world.worker(first))
        first = world.decode
        world.greet(world.worker(first))
    world.deliver()
    assert all(reader.request.poison.isolated for reader in readers)
    assert [reader.request.phase for reader in readers][1:] == [Phase.QUEUED] * 2
    newcomer = world.submit(make_request(4, prompt="neu"))
    world.deliver()
    assert newcomer.request.phase is Phase.PREFILLING, "others may pass"
    world.settle()
    for reader in readers:
        assert reader.token_ids == completion_ids(0, 60)
    world.check_idle()


def test_a_prompt_is_no_lone_suspect_while_an_input_is_on_its_worker() -> None:
    world = World()
    [one] = world.requests.submit(
        [input_request(bytes([9]) * 16, (1, 2, 3), VectorForm(), 600.0)], world.now
    )
    reader = world.submit(make_request(1))
    for _ in range(2):
        world.deliver()
        world.now += LINK.progress_timeout_s + 1.0
        worker = world.worker(world.prefill)
        world.lose(worker, PeerEvent.WEDGED.value)
        for key in list(world.decode.rows):
            world.decode.end(key, EndReason.CANCEL)
        world.greet(worker)
    assert [len(s.poison.strikes) for s in (one, reader.request)] == [2, 2]
    assert reader.request.poison.isolated
    world.settle()
    assert reader.token_ids
    assert one.vector
    world.check_idle()


def all_decode(world: World) -> None:
    """Let every started request get its first token."""
    world.deliver()
    while world.compute(world.worker(world.prefill)):
        world.deliver()


@pytest.mark.parametrize("is_culprit_first", [True, False])
def test_what_a_blamed_request_did_is_held_against_nobody_else(is_culprit_first: bool) -> None:
    world = World()
    culprit, other = (
        world.submit(make_request(number, prompt=f"{number}", max_tokens=60)) for number in (1, 2)
    )
    all_decode(world)
    fail_step(world, world.decode)
    neighbour = world.submit(make_request(3, prompt="neu", max_tokens=60))
    all_decode(world)
    fail_step(world, world.decode)
    assert len(neighbour.request.faults) == 1
    assert len(neighbour.request.poison.strikes) == 1
    all_decode(world)
    assert culprit.request.phase is neighbour.request.phase is Phase.DECODING
    assert other.request.phase is Phase.QUEUED, "only one isolated request at a time"
    if not is_culprit_first:
        world.decode.rows = dict(reversed(world.decode.rows.items()))
    fail_step(world, world.decode)
    world.read(culprit)
    assert culprit.failed.error.code == "no_worker"
    assert world.requests.recovery.num_quarantined == 0, "no process died"
    assert len(neighbour.request.faults) == 1
    assert len(neighbour.request.poison.strikes) == 1
    world.deliver()
    [key] = [k for k in world.decode.rows if k.request_id == (3).to_bytes(16, "big")]
    world.hear(world.worker(world.decode), world.decode.end(key, EndReason.ERROR))
    assert neighbour.request.faults == [key], "the culprit's earlier faults are forgotten too"
    world.settle()
    for reader in (other, neighbour):
        assert reader.token_ids == completion_ids(0, 60)
    world.check_idle()


def lose_twice(world: World) -> None:
    """Lose each of two prefill workers with what it computes."""
    for _ in world.prefills:
        world.deliver()
        busy = next(w for w in world.workers if w.role is Role.PREFILL and w.shares)
        world.lose(busy)
        for key in list(world.decode.rows):
            world.decode.end(key, EndReason.CANCEL)


def test_a_prompt_in_quarantine_ends_where_it_waits() -> None:
    world = World(num_prefills=2)
    world.announce(world.decode, row_credit=1)
    culprit, twin = (world.submit(make_request(number, prompt="böse")) for number in (1, 2))
    lose_twice(world)
    world.announce(world.decode, row_credit=0)
    for fake in world.prefills:
        world.greet(world.worker(fake))
    world.announce(world.decode, row_credit=1)
    world.settle()
    assert culprit.failed.error.code == "quarantined"
    assert twin.failed.error.code == "quarantined"
    assert twin.request.num_attempts == 0


def live_again(world: World, worker: Worker, *, num_lives: int = 0) -> None:
    """Let the lost process itself answer again, perhaps in another epoch."""
    world.of[worker].epoch += num_lives - LIVES
    world.greet(worker)


@pytest.mark.parametrize("num_lives", [0, 1])
def test_processes_that_come_back_convict_nothing_in_whatever_life(num_lives: int) -> None:
    world = World(num_prefills=2, max_attempts=9)
    reader = world.submit(make_request(1, prompt="0"))
    for _ in range(4):
        lose_twice(world)
        assert reader.request.poison.is_blamed
        world.sweep()
        assert reader.request.phase is Phase.QUEUED, "it waits for their outcome"
        for fake in world.prefills:
            live_again(world, world.worker(fake), num_lives=num_lives)
        assert len(reader.request.poison.strikes) == 0
    world.complete(reader, 16)
    assert world.requests.recovery.num_quarantined == 0


@pytest.mark.parametrize("first_died", [True, False])
def test_one_death_and_one_return_convict_nothing(first_died: bool) -> None:
    world = World(num_prefills=2)
    reader = world.submit(make_request(1, prompt="0"))
    lose_twice(world)
    for fake, has_died in zip(world.prefills, (first_died, not first_died), strict=True):
        (world.greet if has_died else partial(live_again, world))(world.worker(fake))
    assert len(reader.request.poison.strikes) == 1
    world.complete(reader, 16)
    assert world.requests.recovery.num_quarantined == 0


def test_a_worker_that_forgot_a_server_which_stood_still_is_not_dead() -> None:
    world = World(num_prefills=1, max_attempts=9)
    world.requests.note_pause(world.now)
    [one] = world.requests.submit(
        [input_request(bytes([9]) * 16, (1,), VectorForm(), 600.0)], world.now
    )
    for _ in range(5):
        world.deliver()
        assert one.phase is Phase.PREFILLING
        # Just short of the pause after which this server drops everything.
        world.now += LINK.lease_ttl_s - LINK.heartbeat_interval_s
        world.requests.note_pause(world.now)
        worker = world.worker(world.prefill)
        world.lose(worker, "goodbye")
        live_again(world, worker)
    world.settle()
    assert one.vector
    assert world.requests.recovery.num_quarantined == 0
    world.check_idle()


def test_a_worker_in_the_step_for_which_it_was_given_up_may_still_die_of_it() -> None:
    world = World(num_decodes=2)
    reader = world.submit(make_request(1, max_tokens=60))
    for _ in world.decodes:
        all_decode(world)
        worker = next(w for w in world.workers if w.role is Role.DECODE and w.shares)
        fake = world.of[worker]
        stuck = replace_frame(fake.heartbeat(), progress=7, has_work=True)
        world.hear(worker, stuck)
        world.sweep(LINK.progress_timeout_s - 0.1)
        world.hear(worker, stuck)
        world.sweep(0.2)
        assert worker.monitor.reason is PeerEvent.WEDGED
        world.requests.welcomed(worker, fake.welcome(), world.now)
        world.hear(worker, stuck)
        assert worker.monitor.is_stuck
        assert reader.request.poison.strikes, "it may still die of that step"
        world.restart(worker)
    world.settle()
    assert reader.failed.error.code == "quarantined"


def test_a_blamed_request_does_not_wait_for_ever_for_workers_that_stay_away() -> None:
    world = World(num_prefills=3)
    reader = world.submit(make_request(1))
    for _ in range(2):
        world.deliver()
        busy = next(w for w in world.workers if w.role is Role.PREFILL and w.shares)
        world.lose(busy)
        for key in list(world.decode.rows):
            world.decode.end(key, EndReason.CANCEL)
    world.sweep()
    assert reader.request.phase is Phase.QUEUED
    world.sweep(world.config.routing.suspect_grace_s)
    world.complete(reader, 16)
    for fake in world.prefills:
        world.greet(world.worker(fake))
    assert world.requests.recovery.num_quarantined == 0, "it got past the point"


def test_a_prompt_is_convicted_for_the_tenant_whose_requests_it_was() -> None:
    world = World(num_prefills=2)
    ours, theirs = (Scheduling(tenant=tenant) for tenant in ("a", "b"))
    culprit = world.submit(make_request(1, prompt="0", scheduling=ours))
    lose_twice(world)
    for fake in world.prefills:
        world.greet(world.worker(fake))
    world.settle()
    assert culprit.failed.error.code == "quarantined"
    with pytest.raises(RequestError, match="not tried again"):
        world.submit(make_request(2, prompt="0", scheduling=ours))
    other = world.submit(make_request(3, prompt="0", scheduling=theirs))
    world.complete(other, 16)


def test_a_grammar_that_held_a_worker_up_ends_its_request_and_is_refused_for_its_tenant() -> None:
    world = World()
    grammar = Grammar(GrammarKind.LARK, 'start: s\ns: s s | "a"')

    def asked(number: int, tenant: str, prompt: str = "frage") -> GenerationRequest:
        request = make_request(
            number, prompt=prompt, max_tokens=60, scheduling=Scheduling(tenant=tenant)
        )
        return replace(request, sampling=replace(request.sampling, grammar=grammar))

    culprit = world.submit(asked(1, "a"))
    waiting = world.submit(asked(4, "a", "noch eine"))
    neighbour = world.submit(make_request(2, prompt="andere", max_tokens=60))
    all_decode(world)
    [key] = [k for k in world.decode.rows if k.request_id == (1).to_bytes(16, "big")]
    world.hear(world.worker(world.decode), world.decode.end(key, EndReason.TOO_COSTLY))
    world.read(culprit)
    error = culprit.failed.error
    assert (error.status, error.code) == (400, "grammar_too_costly")
    assert world.requests.recovery.num_quarantined == 1
    with pytest.raises(RequestError) as caught:
        world.submit(asked(3, "a"))
    assert (caught.value.status, caught.value.code) == (400, "grammar_too_costly")
    other = world.submit(asked(5, "b"))
    world.settle()
    for reader in (neighbour, other, waiting):
        assert reader.token_ids == completion_ids(0, 60)
    assert not neighbour.request.faults
    world.check_idle()
