"""Tests that a request continues when workers die, refuse, preempt or return with another model."""

from __future__ import annotations

import pytest

from server.scheduling.request import Phase
from transport.frames import (
    Ended,
    EndReason,
    FirstToken,
    RefuseReason,
    Reserve,
)
from triolet.errors import RequestError
from triolet.ids import AttemptKey

from .fakes import completion_ids, make_request, replay_of
from .stages import UNFINISHED, brought_to, text_of
from .world import World


@pytest.mark.parametrize("phase", [p for p in UNFINISHED if p is not Phase.QUEUED])
def test_a_lost_decode_worker_costs_no_token_in_any_phase(phase: Phase) -> None:
    world = World(num_decodes=2)
    reader = brought_to(world, phase)
    world.lose(world.worker(world.decode))
    world.complete(reader, 200)
    assert reader.text == text_of(completion_ids(0, 200))
    [replay] = [f for f in world.decodes[1].received if isinstance(f, Reserve)]
    assert replay.attempt == 1
    assert replay_of(replay) == completion_ids(0, 200)[: len(replay_of(replay))]
    world.check_idle()


@pytest.mark.parametrize("cut", range(1, 70))
def test_a_new_attempt_continues_within_any_character(cut: int) -> None:
    world = World(num_decodes=2)
    reader = world.submit(make_request(max_tokens=100, stop=("日本 hört «es»",)))
    world.deliver()
    world.compute(world.worker(world.prefill))
    for _ in range(cut):
        world.compute(world.worker(world.decode))
        world.deliver()
        world.read(reader)
    world.lose(world.worker(world.decode))
    world.settle()
    assert reader.text == "Der Zug fährt über die Brücke 🚂 und "
    assert reader.finished.stop_string == "日本 hört «es»"
    world.check_idle()


def test_a_lost_prefill_worker_before_the_hand_over_begins_again() -> None:
    world = World(num_prefills=2)
    reader = brought_to(world, Phase.PREFILLING)
    world.lose(world.worker(world.prefill))
    world.complete(reader, 200)
    assert reader.request.num_attempts == 2


def test_a_lost_prefill_worker_after_the_hand_over_does_not_matter() -> None:
    world = World()
    reader = brought_to(world, Phase.DECODING)
    world.lose(world.worker(world.prefill))
    world.complete(reader, 200)
    assert reader.request.num_attempts == 1


def test_a_prefill_worker_lost_while_it_ships_begins_again_with_the_token_it_gave() -> None:
    world = World(num_prefills=2)
    reader = brought_to(world, Phase.PREFILLING)
    prefill = world.worker(world.prefill)
    world.compute(prefill)
    first = world.down[prefill].popleft()
    world.decode.rows[AttemptKey(*first_key(first))].is_ready = False  # its KV never arrived
    world.hear(prefill, first)
    world.lose(prefill)
    world.settle()
    [_, again] = [f for f in world.decode.received if isinstance(f, Reserve)]
    assert replay_of(again) == completion_ids(0, 1)
    assert reader.token_ids == completion_ids(0, 200)
    world.check_idle()


def first_key(frame: object) -> tuple[bytes, int]:
    assert isinstance(frame, FirstToken)
    return frame.key


def test_preemption_does_not_count_as_a_failure() -> None:
    world = World(max_attempts=1)
    reader = brought_to(world, Phase.DECODING)
    for _ in range(4):
        [key] = world.decode.rows
        ended = world.decode.end(key, EndReason.PREEMPTED)
        world.down[world.worker(world.decode)].append(ended)
        world.deliver()
        world.compute(world.worker(world.prefill))
        world.compute(world.worker(world.decode))
        world.deliver()
    world.complete(reader, 200)
    assert reader.request.num_attempts == 5


def test_attempts_that_fail_are_bounded() -> None:
    world = World(max_attempts=3)
    reader = world.submit(make_request())
    for _ in range(3):
        world.deliver()
        [key] = world.decode.rows
        ended = world.decode.end(key, EndReason.ERROR)
        world.down[world.worker(world.decode)].append(ended)
    world.settle()
    assert reader.failed.error.code == "no_worker"
    assert reader.failed.error.status == 503
    assert reader.request.num_attempts == 3
    world.check_idle()


def test_a_stream_that_gets_on_outlives_any_number_of_workers() -> None:
    world = World(num_decodes=2, max_attempts=2)
    reader = world.submit(make_request(max_tokens=200))
    for _ in range(8):
        world.deliver()
        world.compute(world.worker(world.prefill))
        busy = next(fake for fake in world.decodes if fake.rows)
        for _ in range(20):
            world.compute(world.worker(busy))
        world.deliver()
        world.read(reader)
        world.lose(world.worker(busy))
        world.greet(world.worker(next(fake for fake in world.decodes if fake.epoch > busy.epoch)))
        world.decodes.reverse()
    assert reader.request.num_attempts == 9
    world.complete(reader, 200)


@pytest.mark.parametrize(
    "reason", [RefuseReason.NO_BLOCKS, RefuseReason.NO_ROWS, RefuseReason.DRAINING]
)
def test_a_refusal_waits_a_moment_and_counts_for_nothing(reason: RefuseReason) -> None:
    world = World(max_attempts=1)
    world.decode.refusal = reason
    reader = world.submit(make_request())
    for _ in range(5):
        world.deliver()
        assert reader.request.phase is Phase.QUEUED
        world.sweep(0.25)
    world.decode.refusal = None
    world.complete(reader, 16)


def test_a_refused_request_goes_to_another_worker_at_once() -> None:
    world = World(num_decodes=2)
    world.decode.refusal = RefuseReason.NO_BLOCKS
    reader = world.submit(make_request())
    world.complete(reader, 16)
    assert [f for f in world.decodes[1].received if isinstance(f, Reserve)]


def test_a_request_that_a_worker_finds_too_long_is_refused_with_400() -> None:
    world = World()
    world.decode.refusal = RefuseReason.TOO_LONG
    reader = world.submit(make_request())
    world.settle()
    assert (reader.failed.error.status, reader.failed.error.code) == (
        400,
        "context_length_exceeded",
    )
    world.check_idle()


def test_a_lost_reserve_leads_to_a_new_attempt() -> None:
    world = World()
    reader = brought_to(world, Phase.RESERVING)
    world.sweep(2.0)
    world.settle()
    assert reader.request.num_attempts == 2
    assert reader.token_ids == completion_ids(0, 200)


def test_requests_wait_for_a_worker_that_restarts() -> None:
    world = World(connect=False)
    reader = world.submit(make_request())
    world.sweep(20.0)
    world.greet_all()
    world.complete(reader, 16)


def test_requests_do_not_wait_for_a_worker_that_stays_away() -> None:
    world = World(connect=False)
    reader = world.submit(make_request())
    world.sweep(30.0)
    world.read(reader)
    assert reader.failed.error.code == "no_worker"
    with pytest.raises(RequestError) as refusal:
        world.submit(make_request(2))
    assert refusal.value.code == "no_worker"
    assert refusal.value.retry_after_s is not None
    world.check_idle()


def test_another_model_does_not_continue_what_one_began() -> None:
    world = World(num_prefills=2, num_decodes=2)
    for fake in (world.prefills[1], world.decodes[1]):
        fake.fingerprint = "other/f32"
        world.greet(world.worker(fake))
    reader = brought_to(world, Phase.DECODING)
    assert reader.request.fingerprint == "tiny/f32"
    world.lose(world.worker(world.decode))
    world.settle()
    assert reader.failed.error.code == "no_worker"
    assert "replaced" in reader.failed.error.message
    assert not world.decodes[1].received
    world.check_idle()


def test_a_request_that_has_begun_nothing_takes_the_other_model() -> None:
    world = World(num_prefills=2, num_decodes=2)
    for fake in (world.prefills[1], world.decodes[1]):
        fake.fingerprint = "other/f32"
        world.greet(world.worker(fake))
    reader = brought_to(world, Phase.RESERVING)
    world.lose(world.worker(world.decode))
    world.settle()
    assert reader.request.fingerprint == "other/f32"
    assert reader.token_ids == completion_ids(0, 200)


@pytest.mark.parametrize("reason", [EndReason.ERROR, EndReason.DRAIN, EndReason.UNKNOWN])
def test_a_prefill_that_ends_without_a_token_leads_to_a_new_attempt(reason: EndReason) -> None:
    world = World()
    reader = brought_to(world, Phase.PREFILLING)
    [key] = world.prefill.waiting
    del world.prefill.waiting[key]
    ended = Ended(*key, reason, num_tokens=0, freed_blocks=0)
    world.hear(world.worker(world.prefill), ended)
    assert len(reader.request.faults) == (reason is not EndReason.DRAIN)
    world.complete(reader, 200)
