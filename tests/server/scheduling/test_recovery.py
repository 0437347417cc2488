"""Tests of how the scheduler reacts to faults: circuit breakers, the retry budget, broken paths,
and pauses of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from server.scheduling.request import Phase
from server.scheduling.requests import FAREWELL
from server.scheduling.status import Observer
from server.scheduling.workers import BreakerState
from transport.frames import Ended, EndReason, Grant, Reserve, TokenRow, Tokens
from transport.liveness import PeerState
from triolet.config import RecoveryConfig

from .fakes import LINK, FakeDecode, completion_ids, make_request
from .stages import brought_to, fail_step
from .world import World

if TYPE_CHECKING:
    from .world import Reader

POOR = RecoveryConfig(retry_burst=1.0, retry_share=0.0, retry_floor_per_s=0.0)
"""Can pay for one retry only."""


class Seen(Observer):
    """Records the calls of an observer."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.dropped: list[str] = []
        self.breakers: list[str] = []
        self.lost: list[tuple[str, int]] = []
        self.joined: list[float | None] = []
        self.pauses: list[float] = []
        self.unaffordable = 0
        self.incidents: list[str] = []
        self.incident = self.incidents.append
        world.observe(self)

    def frames_dropped(self, reason: str, count: int = 1) -> None:
        self.dropped.append(reason)

    def worker_joined(self, worker: str, away_s: float | None = None) -> None:
        self.joined.append(away_s)

    def worker_lost(self, worker: str, cause: str, num_requests: int = 0) -> None:
        self.lost.append((cause, num_requests))

    def breaker_changed(self, worker: str, state: str) -> None:
        self.breakers.append(state)

    def server_paused(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def retry_unaffordable(self) -> None:
        self.unaffordable += 1


def reserved_on(fake: FakeDecode) -> int:
    return len([frame for frame in fake.received if isinstance(frame, Reserve)])


def trip(world: World, fake: FakeDecode) -> list[Reader]:
    """Make requests fail there one by one until the worker is left out."""
    worker = world.worker(fake)
    readers = []
    for number in range(100, 103):
        # No other worker is free, so this one gets it.
        others = [other for other in world.decodes if other is not fake]
        for other in others:
            world.worker(other).busy_until = world.now + 1e9
        readers.append(world.submit(make_request(number)))
        world.deliver()
        for other in others:
            world.worker(other).busy_until = world.now
        fail_step(world, fake)
        world.settle()
    assert worker.breaker.state.value == "open"
    return readers


def test_a_worker_whose_steps_fail_is_left_out_tried_and_used_again() -> None:
    world = World(num_decodes=2)
    seen = Seen(world)
    bad, good = world.decodes
    readers = trip(world, bad)
    for reader in readers:
        assert reader.token_ids == completion_ids(0, 16), "it went elsewhere"
    before = reserved_on(bad)
    for number in range(1, 6):
        world.submit(make_request(number))
        world.settle()
    assert reserved_on(bad) == before
    world.sweep(1.0)
    assert seen.breakers == ["open", "half_open"]
    for number in (10, 11):
        world.submit(make_request(number))
    assert len([f for f in world.up[world.worker(bad)] if isinstance(f, Reserve)]) == 1
    world.settle()
    assert seen.breakers == ["open", "half_open", "closed"]
    assert reserved_on(good) >= 6
    world.check_idle()


def test_a_trial_that_fails_keeps_a_worker_out_for_longer() -> None:
    world = World(num_decodes=2)
    bad = world.decode
    trip(world, bad)
    world.sweep(1.0)
    world.submit(make_request(1))
    world.deliver()
    assert len(bad.rows) == 1
    fail_step(world, bad)
    world.settle()
    world.sweep(1.5)
    assert world.worker(bad).breaker.state.value == "open"
    world.sweep(0.5)
    assert world.worker(bad).breaker.state.value == "half_open"
    world.check_idle()


def test_a_prefill_worker_that_fails_is_left_out_tried_and_used_again() -> None:
    world = World(num_prefills=2)
    seen = Seen(world)
    bad = world.prefill
    worker, other = (world.worker(fake) for fake in world.prefills)
    for number in range(100, 103):
        other.breaker.state = BreakerState.OPEN  # so that the first worker gets it
        world.submit(make_request(number))
        world.deliver()
        other.breaker.state = BreakerState.CLOSED
        [key] = bad.waiting
        bad.waiting.clear()
        bad.steps += 1
        failed = Ended(*key, EndReason.ERROR, 0, 0, failed_step=bad.steps, failed_rows=1)
        world.hear(worker, failed)
        world.settle()
    assert worker.breaker.state is BreakerState.OPEN
    world.sweep(1.0)
    reader = world.submit(make_request(1))
    world.complete(reader, 16)
    assert seen.breakers == ["open", "half_open", "closed"]


def test_the_only_worker_is_never_left_out() -> None:
    world = World()
    trip(world, world.decode)
    reader = world.submit(make_request(1))
    world.complete(reader, 16)


@pytest.mark.parametrize(("has_restarted", "state"), [(True, "closed"), (False, "open")])
def test_a_restarted_worker_begins_with_a_clean_record_and_the_same_life_does_not(
    has_restarted: bool, state: str
) -> None:
    world = World(num_decodes=2)
    bad = world.worker(world.decode)
    trip(world, world.decode)
    if has_restarted:
        world.crash(bad)
    else:
        world.requests.lost(bad, "link_gone", world.now)
    world.greet(bad)
    assert bad.breaker.state.value == state


def test_a_return_says_how_long_the_worker_was_away_and_a_loss_what_it_cost() -> None:
    world = World(num_decodes=2)
    seen, one = Seen(world), world.worker(world.decode)
    world.worker(world.decodes[1]).busy_until = 1e9
    world.submit(make_request(1))
    world.deliver()
    world.beat(one)
    world.now += 1.5
    world.requests.lost(one, "silent", world.now)
    world.now += 0.25
    world.greet(one)
    assert (seen.lost, seen.joined) == ([("silent", 1)], [1.75])
    world.requests.lost(one, "farewell", world.now)
    world.now += 0.5
    world.greet(one)
    assert seen.joined[1:] == [None], "a farewell is not a loss"


def test_a_step_that_fails_counts_once_however_many_were_in_it() -> None:
    world = World(num_decodes=2)
    seen = Seen(world)
    world.worker(world.decodes[1]).busy_until = 1e9
    for number in range(1, 7):
        world.submit(make_request(number))
    world.deliver()
    assert len(world.decode.rows) == 6
    fail_step(world, world.decode)
    assert seen.incidents == [world.worker(world.decode).address]
    assert world.worker(world.decode).breaker.state.value == "closed"
    assert world.requests.recovery.budget.tokens == world.config.recovery.retry_burst - 1 + 0.0
    world.settle()
    assert all(reader.token_ids == completion_ids(0, 16) for reader in world.readers)
    world.check_idle()


def test_a_death_costs_one_retry_however_many_streams_there_were() -> None:
    world = World(num_decodes=2, recovery=POOR)
    for number in range(1, 13):
        world.submit(make_request(number))
    world.deliver()
    world.lose(world.worker(world.decode))
    world.settle()
    assert all(reader.token_ids == completion_ids(0, 16) for reader in world.readers)
    assert world.requests.recovery.budget.tokens == 0


def test_a_retry_that_cannot_be_paid_for_ends_the_request() -> None:
    world = World(recovery=POOR)
    seen = Seen(world)
    readers = [world.submit(make_request(number)) for number in (1, 2)]
    world.deliver()
    for key in list(world.decode.rows):  # each with its own error
        world.hear(world.worker(world.decode), world.decode.end(key, EndReason.ERROR))
    world.settle()
    assert readers[0].token_ids == completion_ids(0, 16)
    assert (readers[1].failed.error.status, readers[1].failed.error.code) == (503, "no_worker")
    assert seen.unaffordable == 1
    world.check_idle()


def test_a_decode_worker_that_computes_no_numbers_is_at_fault_itself() -> None:
    for failed_step, num_incidents in ((0, 0), (7, 1)):
        world = World(num_decodes=2)
        seen = Seen(world)
        brought_to(world, Phase.DECODING)
        [key] = world.decode.rows
        ended = world.decode.end(key, EndReason.ERROR)
        world.hear(world.worker(world.decode), replace(ended, failed_step=failed_step))
        assert len(seen.incidents) == num_incidents


def test_what_is_nobodys_fault_is_free() -> None:
    world = World(recovery=POOR)
    reader = world.submit(make_request())
    for _ in range(5):
        world.deliver()
        [key] = world.decode.rows
        world.hear(world.worker(world.decode), world.decode.end(key, EndReason.PREEMPTED))
        world.prefill.waiting.clear()
    world.complete(reader, 16)
    assert world.requests.recovery.budget.tokens == 1


def test_a_request_goes_elsewhere_after_a_step_that_failed() -> None:
    world = World(num_decodes=2)
    reader = brought_to(world, Phase.DECODING)
    fail_step(world, world.decode)
    world.settle()
    assert reserved_on(world.decodes[1]) == 1
    assert reader.token_ids == completion_ids(0, 200)


@pytest.mark.parametrize(("num_prefills", "num_decodes"), [(2, 1), (1, 2), (2, 2), (1, 1)])
def test_a_pair_that_lost_one_another_is_not_paired_again_if_there_is_another(
    num_prefills: int, num_decodes: int
) -> None:
    world = World(num_prefills, num_decodes)
    reader = brought_to(world, Phase.PREFILLING)
    before = reader.attempt.pair
    world.prefill.waiting.clear()
    lost = Ended(*reader.attempt.key, EndReason.PEER_LOST, 0, 0)
    world.hear(before.prefill, lost)
    after = reader.attempt.pair
    assert (after == before) == (num_prefills == num_decodes == 1)
    assert all(worker.breaker.state.value == "closed" for worker in world.workers)
    world.sweep(world.config.recovery.path_avoid_s + 1.0)
    assert len(world.requests.recovery.paths) == 0
    world.complete(reader, 200)


def test_prefill_whose_kv_is_unwanted_leaves_the_word_to_decode() -> None:
    world = World()
    reader = brought_to(world, Phase.PREFILLING)
    [key] = world.decode.rows
    world.prefill.waiting.clear()
    world.hear(world.worker(world.prefill), Ended(*key, EndReason.UNWANTED, 0, 0))
    assert reader.request.num_attempts == 1
    world.hear(world.worker(world.decode), world.decode.end(key, EndReason.PREEMPTED))
    world.settle()
    assert reader.request.faults == []
    assert reader.token_ids == completion_ids(0, 200)
    world.check_idle()


def test_frames_that_count_for_nothing_are_counted_by_reason() -> None:
    world = World(num_decodes=2)
    seen = Seen(world)
    reader = brought_to(world, Phase.DECODING)
    attempt = reader.attempt
    decode = world.worker(world.decode)
    world.hear(decode, Grant(*attempt.key, epoch=world.decode.epoch))
    world.hear(decode, Tokens(1, (TokenRow(b"?" * 16, 0, 0, 1),)))
    world.requests.lost(decode, "silent", world.now)
    world.hear(decode, Tokens(1, (TokenRow(*attempt.key, 9, 1),)))
    assert seen.dropped == ["doubled_or_old_life", "old_attempt", "not_greeted"]


@pytest.mark.parametrize("phase", [Phase.RESERVING, Phase.PREFILLING, Phase.DECODING])
def test_workers_that_leave_by_themselves_are_held_against_nobody(phase: Phase) -> None:
    world = World(num_prefills=2, num_decodes=2, recovery=POOR)
    seen = Seen(world)
    reader = brought_to(world, phase)
    for _ in range(5):
        for worker in reader.attempt.pair:
            world.lose(worker, FAREWELL)
            world.greet(worker)
    world.settle()
    assert len(reader.request.poison.strikes) == 0
    assert reader.token_ids == completion_ids(0, len(reader.token_ids))
    assert reader.finished
    assert not seen.breakers
    assert not seen.unaffordable


def test_a_short_pause_of_our_own_is_held_against_nobody() -> None:
    world = World(num_decodes=2)
    seen = Seen(world)
    world.requests.note_pause(world.now)
    reader = brought_to(world, Phase.RESERVING)
    world.now += LINK.lease_ttl_s - LINK.heartbeat_interval_s
    world.requests.note_pause(world.now)
    world.requests.sweep(world.now)
    assert seen.pauses == [1.5]
    assert all(worker.monitor.state is PeerState.ALIVE for worker in world.workers)
    assert reader.request.num_attempts == 1
    world.now += 0.4
    world.requests.note_pause(world.now)
    world.requests.sweep(world.now)
    assert reader.request.num_attempts == 1


def test_a_long_pause_of_our_own_costs_an_attempt_and_counts_for_nobody() -> None:
    world = World(num_decodes=2, max_attempts=1, recovery=POOR)
    world.requests.note_pause(world.now)
    reader = brought_to(world, Phase.DECODING)
    world.now += LINK.lease_ttl_s
    world.requests.note_pause(world.now)
    assert reader.request.phase is Phase.QUEUED
    assert not any(worker.is_connected for worker in world.workers)
    world.decode.rows.clear()  # its leases expired
    for down in world.down.values():
        down.clear()
    world.greet_all()
    assert all(worker.breaker.state.value == "closed" for worker in world.workers)
    world.settle()
    assert reader.request.faults == []
    assert reader.token_ids == completion_ids(0, 200)
    assert world.requests.recovery.budget.tokens == 1
    world.check_idle()


def test_a_pause_is_not_held_against_a_client_that_does_not_read() -> None:
    world = World(token_window=8)
    world.requests.note_pause(world.now)
    reader = world.submit(make_request(max_tokens=50))
    world.settle(read=False)
    world.now += world.config.stall_timeout_s + 5.0
    world.requests.note_pause(world.now)
    world.greet_all()
    world.sweep()
    assert reader.request.phase is not Phase.FINISHED
    world.sweep(world.config.stall_timeout_s)
    world.read(reader)
    assert reader.failed.error.code == "request_timeout"
