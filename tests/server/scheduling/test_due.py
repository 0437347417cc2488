"""Tests that sweeps pause, but never beyond the time when something is due."""

from __future__ import annotations

import pytest

from server.contract.generation import CancelReason, Failed, input_request
from server.scheduling.attempt import SweepTimes, due_at
from server.scheduling.request import Phase
from transport.frames import TokenCredit
from transport.liveness import PeerMonitor, PeerState
from triolet.pooling import VectorForm
from triolet.service_class import Scheduling, ServiceClass

from .fakes import LINK, make_request, server_config
from .stages import UNFINISHED, brought_to
from .world import World

CONFIG = server_config()
INTERVAL_S = LINK.sweep_interval_s
TICK_S = INTERVAL_S / 4


def test_sweeps_rest_where_nothing_is_due() -> None:
    times = SweepTimes(CONFIG, 0.0)
    times.note(600.0)
    times.swept(1.0, is_round_over=True)
    assert times.next_at(is_restless=False) == 1.0 + LINK.heartbeat_interval_s / 2
    assert times.next_at(is_restless=True) == 1.0 + INTERVAL_S


def test_what_comes_due_meanwhile_is_looked_for_in_time() -> None:
    times = SweepTimes(CONFIG, 0.0)
    times.swept(1.0, is_round_over=True)
    times.note(1.1)
    assert times.next_at(is_restless=False) == 1.1
    times.note(1.0)  # is overdue: must not cause a sweep for each of many
    assert times.next_at(is_restless=False) == 1.0 + INTERVAL_S


def test_a_round_goes_on_soon_and_keeps_in_mind_what_its_turns_found() -> None:
    times = SweepTimes(CONFIG, 0.0)
    times.note(1.2)
    times.swept(1.0, is_round_over=False)
    assert times.next_at(is_restless=False) == 1.0 + INTERVAL_S
    times.note(9.0)
    times.swept(1.05, is_round_over=True)
    assert times.next_at(is_restless=False) == 1.2
    times.swept(1.2, is_round_over=True)
    assert times.next_at(is_restless=False) == 1.2 + LINK.heartbeat_interval_s / 2


@pytest.mark.parametrize("phase", UNFINISHED)
def test_no_sweep_is_left_out_while_somebody_waits_for_workers(phase: Phase) -> None:
    world = World()
    assert not world.requests.is_restless
    reader = brought_to(world, phase)
    assert world.requests.is_restless == (phase is Phase.QUEUED)
    world.cancel(reader, CancelReason.CLIENT_GONE)
    assert not world.requests.is_restless


def test_no_sweep_is_left_out_while_an_input_waits_and_its_deadline_is_kept_later() -> None:
    world = World()
    world.announce(world.prefill, token_credit=0)
    requests = [input_request(bytes([n]) * 16, (1, 2, 3), VectorForm(), 600.0) for n in range(2)]
    first, second = world.requests.submit(requests, world.now)
    world.collect()
    assert first.attempt is not None
    assert second.attempt is None
    assert world.requests.is_restless
    world.requests.cancel([second], CancelReason.CLIENT_GONE, world.now)
    assert not world.requests.is_restless
    assert due_at(first, world.config) == first.deadline
    world.sweep(601.0)
    assert isinstance(first.terminal, Failed)
    assert first.terminal.error.code == "deadline_exceeded"


def test_no_sweep_is_left_out_while_a_drain_may_end() -> None:
    world = World()
    world.requests.begin_drain(world.now)
    assert world.requests.is_restless


def test_no_sweep_is_left_out_while_somebody_is_held_back() -> None:
    world = World()
    line = world.submit(
        make_request(1, max_tokens=100, scheduling=Scheduling(service_class=ServiceClass.BATCH))
    )
    world.settle(read=False)
    world.down[world.worker(world.decode)].clear()
    urgent = world.submit(make_request(2))
    world.read(line)
    assert urgent.request.phase is Phase.RESERVING
    assert world.requests.is_restless
    world.settle()
    assert world.requests.is_restless  # until a sweep finds no waiting request
    world.sweep()
    assert not world.requests.is_restless
    world.settle()
    assert len(line.token_ids) == 100


def test_a_stalled_reader_is_due_when_its_patience_ends() -> None:
    world = World(token_window=4)
    reader = world.submit(make_request(max_tokens=100))
    world.settle(read=False)
    world.sweep()
    since = reader.request.output.waiting_since
    assert since is not None
    world.now = since + world.config.stall_timeout_s
    assert due_at(reader.request, world.config) <= world.now
    world.sweep()
    assert reader.request.phase is Phase.FINISHED


def test_nobody_rests_while_a_stream_waits_for_credit_that_was_lost() -> None:
    world = World(token_window=4)
    reader = world.submit(make_request(max_tokens=100))
    world.settle(read=False)
    world.read(reader)
    decode = world.worker(world.decode)
    world.up[decode].clear()
    began_at = world.now
    while not any(isinstance(frame, TokenCredit) for frame in world.up[decode]):
        world.now = world.requests.sweep_times.next_at(is_restless=False)
        world.sweep()
        assert world.now <= began_at + LINK.heartbeat_interval_s + INTERVAL_S


@pytest.mark.parametrize("has_work", [False, True])
def test_a_monitor_changes_its_mind_when_it_said_and_not_before(has_work: bool) -> None:
    monitor = PeerMonitor(LINK, 0.0)
    seen = [monitor.state]
    now = 0.0
    monitor.greeted(1, now)
    monitor.heartbeat(1, now, progress=1, has_work=has_work)
    while monitor.state is not PeerState.DEAD:
        before, due = monitor.state, monitor.due_at
        assert monitor.check(due - TICK_S) is before
        now = max(now, due) + TICK_S
        seen.append(monitor.check(now))
    assert seen == [PeerState.CONNECTING, PeerState.SUSPECT, PeerState.DEAD]
    assert now <= LINK.peer_timeout_s + INTERVAL_S


def test_who_reads_alike_gets_credit_in_one_frame() -> None:
    world = World(token_window=64)
    prefill, decode = world.worker(world.prefill), world.worker(world.decode)
    for number in range(1, 4):
        world.submit(make_request(number, max_tokens=400))
        world.deliver()
        while world.compute(prefill):
            world.deliver()
        for _ in range(3):  # each is three tokens behind the previous one
            world.compute(decode)
            world.deliver()
    for _ in range(320):
        world.compute(decode)
        world.deliver()
        for reader in world.readers:
            world.read(reader)
    rows = [len(f.rows) for f in world.decode.received if isinstance(f, TokenCredit)]
    assert sum(rows) >= 3 * 320 // 16
    assert len(rows) <= 320 // 16 + 5
