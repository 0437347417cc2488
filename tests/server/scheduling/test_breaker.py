"""Tests of circuit breakers: every table cell, what opens and closes them, and the half of a pool
that stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.scheduling.workers import (
    MAX_OUTCOMES,
    TRANSITIONS,
    Breaker,
    BreakerEvent,
    BreakerState,
    Worker,
    ejected,
    next_state,
)
from triolet.config import LinkConfig, RecoveryConfig
from triolet.errors import LocalProtocolError
from triolet.ids import AttemptKey, Role

S, E = BreakerState, BreakerEvent
CONFIG = RecoveryConfig()
LIMIT = CONFIG.breaker_min_failures
KEYS = [AttemptKey(bytes([n]) * 16, 0) for n in range(3)]


def tripped(now: float = 0.0) -> Breaker:
    breaker = Breaker(CONFIG)
    for _ in range(LIMIT):
        breaker.failed(now)
    assert breaker.state is S.OPEN
    return breaker


def half_open() -> tuple[Breaker, float]:
    breaker = tripped()
    breaker.advance(CONFIG.breaker_cooldown_s)
    assert breaker.state is S.HALF_OPEN
    return breaker, CONFIG.breaker_cooldown_s


@pytest.mark.parametrize(("state", "event"), [(s, e) for s in S for e in E])
def test_each_step_is_in_the_table_or_an_error(state: BreakerState, event: BreakerEvent) -> None:
    following = TRANSITIONS[state].get(event)
    if following is None:
        with pytest.raises(LocalProtocolError):
            next_state(state, event)
    else:
        assert next_state(state, event) is following


def test_reset_leads_from_everywhere_to_closed_and_every_state_is_reachable() -> None:
    assert all(TRANSITIONS[state][E.RESET] is S.CLOSED for state in S)
    assert {state for row in TRANSITIONS.values() for state in row.values()} == set(S)


def test_it_trips_at_the_limit_and_not_before() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(LIMIT - 1):
        breaker.failed(1.0)
    assert breaker.is_admitting
    breaker.failed(1.0)
    assert not breaker.is_admitting


def test_failures_beside_more_successes_do_not_trip() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(3 * MAX_OUTCOMES):
        breaker.succeeded(1.0)
        breaker.succeeded(1.0)
        breaker.failed(1.0)
    assert breaker.state is S.CLOSED


def test_half_of_the_outcomes_are_enough() -> None:
    breaker = Breaker(CONFIG)
    while breaker.state is S.CLOSED:
        breaker.succeeded(1.0)
        breaker.failed(1.0)
    assert breaker.state is S.OPEN


def test_failures_of_long_ago_do_not_count() -> None:
    breaker = Breaker(CONFIG)
    for number in range(2 * LIMIT):
        breaker.failed(number * (CONFIG.breaker_memory_s + 1.0))
    assert breaker.state is S.CLOSED


def test_an_open_one_is_tried_by_one_attempt_after_its_cooldown() -> None:
    breaker = tripped()
    breaker.advance(CONFIG.breaker_cooldown_s / 2)
    assert not breaker.is_admitting
    breaker.advance(CONFIG.breaker_cooldown_s)
    assert breaker.is_admitting
    breaker.begin(KEYS[0])
    assert not breaker.is_admitting
    breaker.begin(KEYS[1])  # allowed because half of the pool must stay: not the probe
    breaker.leave(KEYS[1])
    assert breaker.probe == KEYS[0]
    breaker.leave(KEYS[0])  # its client left, without an outcome
    assert breaker.is_admitting
    assert breaker.state is S.HALF_OPEN


def test_a_probe_that_succeeds_closes_it_and_forgets() -> None:
    breaker, now = half_open()
    breaker.begin(KEYS[0])
    breaker.succeeded(now)
    assert breaker.state is S.CLOSED
    for _ in range(LIMIT - 1):
        breaker.failed(now)
    assert breaker.state is S.CLOSED


def test_cooldowns_double_up_to_a_bound_and_begin_anew_after_a_success() -> None:
    breaker, now = half_open()
    pauses = []
    for _ in range(8):
        breaker.failed(now)
        opened_at = now
        while breaker.state is S.OPEN:
            now += CONFIG.breaker_cooldown_s / 4
            breaker.advance(now)
        pauses.append(now - opened_at)
    assert pauses == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    breaker.succeeded(now)
    for _ in range(LIMIT):
        breaker.failed(now)
    breaker.advance(now + CONFIG.breaker_cooldown_s)
    assert breaker.state is S.HALF_OPEN


def test_what_began_before_it_opened_changes_nothing() -> None:
    breaker = tripped()
    breaker.succeeded(0.1)
    breaker.failed(0.1)
    assert not breaker.is_admitting
    breaker.advance(CONFIG.breaker_cooldown_s)
    assert breaker.state is S.HALF_OPEN


def pool_of(*breakers: Breaker) -> list[Worker]:
    """Return workers with these breakers."""
    workers = []
    for number, breaker in enumerate(breakers):
        worker = Worker(Role.DECODE, f"mem://{number}", LinkConfig(), CONFIG, 0.0)
        worker.breaker = breaker
        workers.append(worker)
    return workers


@pytest.mark.parametrize(
    ("num_workers", "num_failing", "num_out"),
    [(1, 1, 0), (2, 1, 1), (2, 2, 1), (3, 2, 1), (5, 5, 2), (6, 4, 3), (4, 1, 1), (4, 0, 0)],
)
def test_at_most_half_of_a_pool_is_left_out(
    num_workers: int, num_failing: int, num_out: int
) -> None:
    breakers = [tripped(now=float(n)) for n in range(num_failing)]
    pool = pool_of(*breakers, *(Breaker(CONFIG) for _ in range(num_workers - num_failing)))
    assert ejected(pool) == pool[:num_out], "those that failed first"


def test_zones_and_models_share_the_half_of_a_pool_that_is_left_out() -> None:
    confined = [Breaker(CONFIG), Breaker(CONFIG)]
    for now, breaker in enumerate(confined):
        breaker.confine(0.1, float(now))
        breaker.confine(0.2, 9.0)
    pool = pool_of(*confined, tripped(now=5.0), Breaker(CONFIG))
    assert ejected(pool) == [pool[2], pool[0]], "a worker that fails goes before one that returns"
    pool[2].fingerprint = "another"
    assert ejected(pool) == [pool[0]], "half of three, and nothing of a single worker"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ok", "bad", "time", "begin", "leave", "reset"]), st.integers(0, 2)
        ),
        max_size=80,
    )
)
def test_random_events_never_leave_the_table(events: list[tuple[str, int]]) -> None:
    breaker, now = Breaker(CONFIG), 0.0
    begun: set[AttemptKey] = set()
    for name, number in events:
        key = KEYS[number]
        match name:
            case "ok":
                breaker.succeeded(now)
            case "bad":
                breaker.failed(now)
            case "time":
                now += number
                breaker.advance(now)
            case "begin" if breaker.is_admitting and key not in begun:
                breaker.begin(key)
                begun.add(key)
            case "leave":
                breaker.leave(key)
                begun.discard(key)
            case "reset":
                breaker.reset()
        assert breaker.probe is None or breaker.probe in begun
        assert breaker.state is S.HALF_OPEN or breaker.probe is None
        assert breaker.state is not S.OPEN or not breaker.is_admitting
    breaker.advance(now + CONFIG.breaker_max_cooldown_s)
    breaker.leave(breaker.probe or KEYS[0])
    assert breaker.is_admitting, "no worker is left out for ever"
