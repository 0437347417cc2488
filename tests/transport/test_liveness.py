"""Tests of peer liveness: every cell of the state table, silence, lack of progress, new epochs, and
pauses of our own process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.liveness import (
    QUIET_INTERVALS,
    TRANSITIONS,
    PeerEvent,
    PeerMonitor,
    PeerState,
    SelfFence,
    next_state,
)
from triolet.config import LinkConfig
from triolet.errors import LocalProtocolError

S, E = PeerState, PeerEvent
CONFIG = LinkConfig()
QUIET_S = QUIET_INTERVALS * CONFIG.heartbeat_interval_s
EPOCH = 7


@pytest.mark.parametrize(("state", "event"), [(s, e) for s in PeerState for e in PeerEvent])
def test_each_step_is_in_the_table_or_an_error(state: PeerState, event: PeerEvent) -> None:
    following = TRANSITIONS[state].get(event)
    if following is None:
        with pytest.raises(LocalProtocolError):
            next_state(state, event)
    else:
        assert next_state(state, event) is following


def test_every_state_is_reachable_and_death_is_possible_from_each() -> None:
    assert {s for row in TRANSITIONS.values() for s in row.values()} == set(S) - {S.CONNECTING}
    for state in set(S) - {S.DEAD}:
        assert TRANSITIONS[state][E.LOST] is S.DEAD
        assert TRANSITIONS[state][E.SILENT] is S.DEAD
    assert set(TRANSITIONS[S.DEAD]) == {E.GREETED}


def greeted(now: float = 0.0) -> PeerMonitor:
    monitor = PeerMonitor(CONFIG, now)
    assert not monitor.greeted(EPOCH, now)
    return monitor


def test_a_peer_that_never_answers_is_given_up() -> None:
    monitor = PeerMonitor(CONFIG, 10.0)
    assert monitor.check(10.0 + CONFIG.hello_timeout_s) is S.CONNECTING
    assert monitor.check(10.1 + CONFIG.hello_timeout_s) is S.DEAD
    assert monitor.epoch is None


def test_silence_makes_suspect_and_then_dead() -> None:
    monitor = greeted()
    assert monitor.check(QUIET_S) is S.ALIVE
    assert monitor.check(QUIET_S + 0.1) is S.SUSPECT
    assert monitor.check(CONFIG.peer_timeout_s) is S.SUSPECT
    assert monitor.check(CONFIG.peer_timeout_s + 0.1) is S.DEAD
    assert monitor.check(CONFIG.peer_timeout_s + 0.2) is S.DEAD


def test_a_suspect_that_speaks_lives() -> None:
    monitor = greeted()
    monitor.check(QUIET_S + 0.1)
    monitor.heard(QUIET_S + 0.2)
    assert monitor.state is S.ALIVE
    assert monitor.check(QUIET_S + 0.3) is S.ALIVE


def test_one_late_heartbeat_is_no_death() -> None:
    monitor = greeted()
    now = 0.0
    for gap in (0.5, 1.0, 0.5, 1.4, 0.5):
        now += gap
        assert monitor.check(now) is not S.DEAD
        assert monitor.heartbeat(EPOCH, now)


def test_no_progress_with_work_pending_is_death_although_it_answers() -> None:
    monitor = greeted()
    now = 0.0
    while monitor.check(now) is S.ALIVE:
        assert now < 10.0
        monitor.heartbeat(EPOCH, now, progress=3, has_work=True)
        now += CONFIG.heartbeat_interval_s
    assert monitor.state is S.DEAD
    assert CONFIG.progress_timeout_s < now <= CONFIG.progress_timeout_s + 0.6


def test_progress_or_idleness_keeps_it_alive() -> None:
    busy, idle = greeted(), greeted()
    for beat in range(20):
        now = beat * CONFIG.heartbeat_interval_s
        busy.heartbeat(EPOCH, now, progress=beat, has_work=True)
        idle.heartbeat(EPOCH, now, progress=3, has_work=False)
        assert busy.check(now) is S.ALIVE
        assert idle.check(now) is S.ALIVE


def test_the_time_without_progress_begins_with_the_work() -> None:
    monitor = greeted()
    for beat in range(20):
        monitor.heartbeat(EPOCH, beat * 0.5, progress=3, has_work=False)
    monitor.heartbeat(EPOCH, 10.0, progress=3, has_work=True)
    assert monitor.check(10.0) is S.ALIVE
    monitor.heartbeat(EPOCH, 10.5, progress=3, has_work=True)
    assert monitor.check(10.5) is S.ALIVE


def test_another_epoch_is_another_peer() -> None:
    monitor = greeted()
    assert not monitor.greeted(EPOCH, 1.0), "the same epoch may greet again"
    assert not monitor.heartbeat(EPOCH + 1, 1.0), "an epoch that was not greeted is ignored"
    assert monitor.greeted(EPOCH + 1, 1.1), "the old epoch is over"
    assert monitor.epoch == EPOCH + 1
    assert not monitor.heartbeat(EPOCH, 1.2), "so is the old epoch"


def test_frames_of_strangers_do_not_prolong_a_life() -> None:
    monitor = greeted()
    monitor.heartbeat(EPOCH + 1, 1.4)
    assert monitor.check(CONFIG.peer_timeout_s + 0.1) is S.DEAD


def test_the_dead_are_revived_by_a_greeting_only() -> None:
    monitor = greeted()
    monitor.lost()
    monitor.lost()
    assert monitor.state is S.DEAD
    monitor.heard(0.1)
    assert not monitor.heartbeat(EPOCH, 0.1)
    assert monitor.check(0.1) is S.DEAD
    monitor.greeted(EPOCH, 0.2)
    assert monitor.check(0.3) is S.ALIVE


def test_frames_before_the_greeting_count_for_nothing() -> None:
    monitor = PeerMonitor(CONFIG, 0.0)
    monitor.heard(4.9)
    assert not monitor.heartbeat(EPOCH, 4.9)
    assert monitor.check(CONFIG.hello_timeout_s + 0.1) is S.DEAD


def test_a_process_that_stood_still_longer_than_its_leases_fences_itself_once() -> None:
    fence = SelfFence(CONFIG, 0.0, CONFIG.lease_ttl_s)
    assert not fence.beat(CONFIG.sweep_interval_s)
    assert not fence.beat(CONFIG.sweep_interval_s + CONFIG.lease_ttl_s)
    assert fence.beat(10.0)
    assert not fence.beat(10.05)


def test_time_in_which_nobody_listened_is_not_silence() -> None:
    monitor = greeted()
    monitor.heartbeat(EPOCH, 1.0, progress=3, has_work=True)
    monitor.excuse(60.0)
    assert monitor.check(61.0 + CONFIG.peer_timeout_s) is not S.DEAD
    assert monitor.check(61.1 + CONFIG.peer_timeout_s) is S.DEAD


def test_only_gaps_that_could_mislead_count_as_absence() -> None:
    fence = SelfFence(CONFIG, 0.0, CONFIG.lease_ttl_s)
    gaps = [CONFIG.sweep_interval_s, CONFIG.heartbeat_interval_s, 0.6, 1.9, 0.05]
    now, absences = 0.0, []
    for gap in gaps:
        now += gap
        assert not fence.beat(now)
        absences.append(round(fence.absence_s, 6))
    assert absences == [0.0, 0.0, 0.6, 1.9, 0.0]


EVENTS = st.one_of(
    st.tuples(st.just("greet"), st.integers(1, 3)),
    st.tuples(st.just("beat"), st.integers(1, 3)),
    st.tuples(st.just("work"), st.integers(1, 3)),
    st.tuples(st.sampled_from(["hear", "lose"]), st.just(0)),
    st.tuples(st.sampled_from(["pass", "excuse"]), st.integers(0, 20)),
)


@given(st.lists(EVENTS, max_size=60))
def test_random_events_never_leave_the_table_and_no_dead_peer_comes_back_by_itself(
    events: list[tuple[str, int]],
) -> None:
    monitor, now = PeerMonitor(CONFIG, 0.0), 0.0
    for name, number in events:
        before = monitor.state
        match name:
            case "greet":
                known = monitor.epoch
                assert monitor.greeted(number, now) == (known is not None and known != number)
            case "beat" | "work":
                is_known = monitor.heartbeat(number, now, progress=0, has_work=name == "work")
                is_of_this_life = number == monitor.epoch and before in (S.ALIVE, S.SUSPECT)
                assert is_known == is_of_this_life
            case "hear":
                monitor.heard(now)
            case "lose":
                monitor.lost()
            case "excuse":
                monitor.excuse(number / 10)
            case _:
                now += number / 10
                monitor.check(now)
        if name != "greet" and before in (S.DEAD, S.CONNECTING):
            assert monitor.state in (before, S.DEAD)
        assert (monitor.epoch is None) <= (monitor.state in (S.CONNECTING, S.DEAD))
    # Whatever happened before, silence ends it.
    assert monitor.check(now + 1000.0) is S.DEAD


def test_a_peer_that_says_its_steps_are_long_is_given_ten_of_them() -> None:
    monitor = PeerMonitor(CONFIG, now=0.0)
    monitor.greeted(1, now=0.0, step_s=2.0)
    now = 0.0
    while monitor.check(now) is PeerState.ALIVE:
        now += CONFIG.heartbeat_interval_s
        monitor.heartbeat(1, now, progress=7, has_work=True)
    assert 20.0 < now <= 20.0 + 3 * CONFIG.heartbeat_interval_s
    assert monitor.reason is PeerEvent.WEDGED


def test_one_standstill_counts_once_however_often_its_worker_is_greeted_meanwhile() -> None:
    monitor = PeerMonitor(CONFIG, now=0.0)
    monitor.greeted(1, now=0.0)
    now, num_deaths = 0.0, 0
    while now < 10 * CONFIG.progress_timeout_s:
        now += CONFIG.heartbeat_interval_s
        monitor.heartbeat(1, now, progress=7, has_work=True)
        if monitor.check(now) is PeerState.DEAD:
            num_deaths += 1
            monitor.greeted(1, now)
    assert num_deaths == 1
    assert monitor.is_stuck
    assert monitor.due_at > now, "nothing changes before it makes progress or falls silent"
    monitor.heartbeat(1, now, progress=8, has_work=True)
    while monitor.check(now) is PeerState.ALIVE:
        now += CONFIG.heartbeat_interval_s
        monitor.heartbeat(1, now, progress=8, has_work=True)
    assert monitor.reason is PeerEvent.WEDGED, "the next standstill counts again"


def test_who_is_still_in_the_step_for_which_it_was_given_up_is_stuck_until_it_moves() -> None:
    monitor = PeerMonitor(CONFIG, now=0.0)
    monitor.greeted(1, now=0.0)
    now = 0.0
    while monitor.check(now) is PeerState.ALIVE:
        now += CONFIG.heartbeat_interval_s
        monitor.heartbeat(1, now, progress=7, has_work=True)
    monitor.greeted(1, now)
    monitor.heartbeat(1, now, progress=7, has_work=True)
    assert (monitor.state, monitor.is_stuck) == (PeerState.ALIVE, True)
    monitor.heartbeat(1, now, progress=7, has_work=False)
    assert not monitor.is_stuck
    monitor.heartbeat(1, now, progress=8, has_work=True)
    assert not monitor.is_stuck
    monitor.greeted(2, now)
    monitor.heartbeat(2, now, progress=7, has_work=True)
    assert not monitor.is_stuck
