"""Tests of leases: every cell of the state tables, the single release path, tombstones, renewal and
expiry."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from transport.frames import EndReason
from transport.lease import (
    DECODE_TRANSITIONS,
    PREFILL_TRANSITIONS,
    LeaseEvent,
    LeaseState,
    LeaseTable,
    Standing,
)
from triolet.config import LinkConfig
from triolet.errors import LeaseError
from triolet.ids import AttemptKey, PeerId, Role

if TYPE_CHECKING:
    from transport.lease import Transitions

S, E = LeaseState, LeaseEvent
CONFIG = LinkConfig()
SERVER = PeerId(Role.SERVER, "web-0", 1)
OTHER_LIFE = PeerId(Role.SERVER, "web-0", 2)
KEY = AttemptKey(b"a" * 16, 0)
NEXT = AttemptKey(b"a" * 16, 1)
LATER = AttemptKey(b"a" * 16, 2)

TABLES = {"decode": DECODE_TRANSITIONS, "prefill": PREFILL_TRANSITIONS}

PATHS: dict[str, dict[LeaseState, tuple[LeaseEvent, ...]]] = {
    # How to reach each state but the last.
    "decode": {
        S.RESERVED: (),
        S.FILLING: (E.FIRST_CHUNK,),
        S.READY: (E.COMPLETE,),
        S.RUNNING: (E.COMPLETE, E.START),
        S.PAUSED: (E.COMPLETE, E.START, E.PAUSE),
    },
    "prefill": {
        S.RESERVED: (),
        S.RUNNING: (E.START,),
        S.SHIPPING: (E.START, E.COMPUTED),
    },
}


def decode_table(config: LinkConfig = CONFIG) -> LeaseTable:
    return LeaseTable(DECODE_TRANSITIONS, config)


def in_state(role: str, state: LeaseState) -> LeaseTable:
    table = LeaseTable(TABLES[role], CONFIG)
    table.reserve(KEY, SERVER, 0.0, 60.0)
    for event in PATHS[role][state]:
        table.step(KEY, event)
    return table


CELLS = [
    (role, state, event)
    for role in TABLES
    for state in PATHS[role]
    for event in LeaseEvent
    if event is not E.END
]


@pytest.mark.parametrize(("role", "state", "event"), CELLS)
def test_each_step_is_in_the_table_or_changes_nothing(
    role: str, state: LeaseState, event: LeaseEvent
) -> None:
    table = in_state(role, state)
    following = TABLES[role][state].get(event)
    if following is None:
        with pytest.raises(LeaseError):
            table.step(KEY, event)
    else:
        assert table.step(KEY, event) is following
    lease = table.get(KEY)
    assert lease is not None
    assert lease.state is (following or state)


@pytest.mark.parametrize(
    ("role", "state"), [(role, state) for role in TABLES for state in PATHS[role]]
)
def test_end_leads_from_every_state_to_released_by_the_one_path(
    role: str, state: LeaseState
) -> None:
    table = in_state(role, state)
    with pytest.raises(LeaseError, match="release"):
        table.step(KEY, E.END)
    lease = table.release(KEY, 1.0)
    assert lease is not None
    assert lease.state is S.RELEASED
    assert table.release(KEY, 1.0) is None
    assert not table.is_live(KEY)


@pytest.mark.parametrize("role", TABLES)
def test_every_state_is_reachable_and_released_is_the_only_last_one(role: str) -> None:
    transitions: Transitions = TABLES[role]
    reached = {S.RESERVED}
    while grown := {s for known in reached for s in transitions[known].values()} - reached:
        reached |= grown
    assert reached == set(transitions)
    assert transitions[S.RELEASED] == {}
    for state in set(transitions) - {S.RELEASED}:
        assert transitions[state][E.END] is S.RELEASED


def test_reserve_is_idempotent() -> None:
    table = decode_table()
    lease = table.reserve(KEY, SERVER, 0.0, 60.0)
    assert table.reserve(KEY, SERVER, 1.0, 60.0) is lease
    assert (lease.granted_at, lease.expires_at, lease.deadline) == (0.0, CONFIG.lease_ttl_s, 60.0)
    assert len(table) == 1


def test_an_end_that_overtakes_its_reserve_wins() -> None:
    table = decode_table()
    assert table.release(KEY, 0.0) is None
    assert table.standing(KEY) is Standing.ENDED
    with pytest.raises(LeaseError, match="over"):
        table.reserve(KEY, SERVER, 0.1, 60.0)
    assert table.standing(NEXT) is Standing.NEW


def test_a_new_attempt_waits_for_the_release_of_the_older() -> None:
    table = decode_table()
    table.reserve(KEY, SERVER, 0.0, 60.0)
    assert table.superseded_by(NEXT) == KEY
    with pytest.raises(LeaseError, match="must be released"):
        table.reserve(NEXT, SERVER, 0.0, 60.0)
    table.release(KEY, 0.0)
    assert table.superseded_by(NEXT) is None
    table.reserve(NEXT, SERVER, 0.0, 60.0)
    assert table.standing(NEXT) is Standing.LIVE


def test_a_late_reserve_of_an_older_attempt_is_over() -> None:
    table = decode_table()
    table.reserve(NEXT, SERVER, 0.0, 60.0)
    assert table.standing(KEY) is Standing.ENDED
    table.release(NEXT, 0.0)
    assert table.standing(KEY) is Standing.ENDED


def test_the_end_of_a_newer_attempt_ends_the_older_too() -> None:
    table = decode_table()
    older = table.reserve(KEY, SERVER, 0.0, 60.0)
    assert table.release(NEXT, 0.0) is older
    assert table.standing(NEXT) is Standing.ENDED


def test_a_late_end_of_an_older_attempt_leaves_the_newer_alone() -> None:
    table = decode_table()
    table.release(KEY, 0.0)
    table.reserve(NEXT, SERVER, 0.0, 60.0)
    assert table.release(KEY, 1.0) is None
    assert table.is_live(NEXT)
    assert table.standing(LATER) is Standing.NEW


def test_a_named_lease_lives_and_an_unnamed_one_expires() -> None:
    table = decode_table()
    other = AttemptKey(b"b" * 16, 0)
    table.reserve(KEY, SERVER, 0.0, 60.0)
    table.reserve(other, SERVER, 0.0, 60.0)
    assert table.renew(SERVER, [KEY], 1.5) == []
    assert table.expired(CONFIG.lease_ttl_s - 0.01) == []
    assert table.expired(CONFIG.lease_ttl_s) == [(other, EndReason.LEASE_EXPIRED)]
    assert table.expired(1.5 + CONFIG.lease_ttl_s) == [
        (KEY, EndReason.LEASE_EXPIRED),
        (other, EndReason.LEASE_EXPIRED),
    ]


def test_another_life_of_the_server_renews_nothing() -> None:
    table = decode_table()
    table.reserve(KEY, SERVER, 0.0, 60.0)
    assert table.renew(OTHER_LIFE, [KEY], 1.5) == [KEY]
    assert table.expired(CONFIG.lease_ttl_s) == [(KEY, EndReason.LEASE_EXPIRED)]
    assert table.owned_by(SERVER) == [KEY]
    assert table.owned_by(OTHER_LIFE) == []


def test_the_server_is_told_of_attempts_that_are_not_here() -> None:
    table = decode_table()
    table.reserve(NEXT, SERVER, 0.0, 60.0)
    assert table.renew(SERVER, [KEY, NEXT], 0.5) == [KEY]


def test_a_heartbeat_that_comes_late_takes_nothing_away() -> None:
    table = decode_table()
    lease = table.reserve(KEY, SERVER, 0.0, 60.0)
    table.renew(SERVER, [KEY], 1.5)
    table.renew(SERVER, [KEY], 1.0)
    assert lease.expires_at == 1.5 + CONFIG.lease_ttl_s


def test_a_deadline_ends_even_what_is_renewed() -> None:
    table = decode_table()
    table.reserve(KEY, SERVER, 0.0, 3.0)
    table.renew(SERVER, [KEY], 2.9)
    assert table.expired(3.0) == [(KEY, EndReason.DEADLINE)]


def test_tombstones_are_forgotten_after_their_time() -> None:
    table = decode_table()
    table.release(KEY, 0.0)
    table.expired(CONFIG.tombstone_s - 0.1)
    assert table.standing(KEY) is Standing.ENDED
    table.expired(CONFIG.tombstone_s)
    assert table.standing(KEY) is Standing.NEW


def test_tombstones_are_bounded_and_the_oldest_goes_first() -> None:
    table = decode_table(replace(CONFIG, max_tombstones=2))
    keys = [AttemptKey(bytes([n]) * 16, 0) for n in range(3)]
    for now, key in enumerate(keys):
        table.release(key, float(now))
    assert [table.standing(key) for key in keys] == [
        Standing.NEW,
        Standing.ENDED,
        Standing.ENDED,
    ]


def test_burying_again_prolongs_the_memory_and_never_lowers_it() -> None:
    table = decode_table()
    table.release(NEXT, 0.0)
    table.release(KEY, 20.0)
    table.expired(CONFIG.tombstone_s)
    assert table.standing(NEXT) is Standing.ENDED


def test_leases_are_counted_by_state() -> None:
    table = in_state("decode", S.PAUSED)
    assert table.count(S.PAUSED) == 1
    assert table.count(S.RUNNING) == 0
    assert [lease.key for lease in table.leases()] == [KEY]


@given(st.sampled_from(sorted(TABLES)), st.lists(st.sampled_from([e for e in E if e is not E.END])))
def test_random_events_never_leave_the_table(role: str, events: list[LeaseEvent]) -> None:
    table = LeaseTable(TABLES[role], CONFIG)
    lease = table.reserve(KEY, SERVER, 0.0, 60.0)
    for event in events:
        before = lease.state
        try:
            table.step(KEY, event)
        except LeaseError:
            assert event not in TABLES[role][before]
            assert lease.state is before
    assert lease.state in TABLES[role]


class LeaseMachine(RuleBasedStateMachine):
    """Random orders of frames and time: no lease is freed twice, none is left over."""

    keys = st.builds(AttemptKey, st.sampled_from([b"x" * 16, b"y" * 16]), st.integers(0, 3))
    servers = st.sampled_from([SERVER, OTHER_LIFE])

    @initialize()
    def start(self) -> None:
        self.table = decode_table()
        self.now = 0.0
        self.holding: set[AttemptKey] = set()
        self.ended: set[AttemptKey] = set()

    def end(self, key: AttemptKey) -> None:
        lease = self.table.release(key, self.now)
        if lease is not None:
            self.holding.remove(lease.key)  # KeyError: freed twice
            self.ended.add(lease.key)
        self.ended.add(key)

    @rule(key=keys, server=servers)
    def reserve(self, key: AttemptKey, server: PeerId) -> None:
        older = self.table.superseded_by(key)
        if older is not None:
            self.end(older)
        if self.table.standing(key) is Standing.ENDED:
            return
        assert key not in self.ended, "an ended attempt was revived"
        self.table.reserve(key, server, self.now, 5.0)
        self.holding.add(key)

    @rule(key=keys)
    def release(self, key: AttemptKey) -> None:
        self.end(key)

    @rule(key=keys, event=st.sampled_from([e for e in E if e is not E.END]))
    def step(self, key: AttemptKey, event: LeaseEvent) -> None:
        lease = self.table.get(key)
        if lease is not None and event in DECODE_TRANSITIONS[lease.state]:
            self.table.step(key, event)

    @rule(named=st.lists(keys, max_size=3), server=servers)
    def heartbeat(self, named: list[AttemptKey], server: PeerId) -> None:
        self.table.renew(server, named, self.now)

    @rule(seconds=st.floats(0.0, 3.0))
    def sweep(self, seconds: float) -> None:
        self.now = min(self.now + seconds, CONFIG.tombstone_s - 1)
        for key, _ in self.table.expired(self.now):
            self.end(key)
        assert self.table.expired(self.now) == []

    @invariant()
    def what_is_held_is_what_lives(self) -> None:
        assert {lease.key for lease in self.table.leases()} == self.holding
        assert len({key.request_id for key in self.holding}) == len(self.holding)

    def teardown(self) -> None:
        if hasattr(self, "table"):
            for key, _ in self.table.expired(self.now + 60.0):
                self.end(key)
            assert not self.holding


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=60, stateful_step_count=40)
