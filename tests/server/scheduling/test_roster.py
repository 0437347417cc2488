"""Tests that a request compares few workers of a large fleet, and is placed as well as if it
compared all."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.scheduling.roster import Roster
from server.scheduling.routing import Need, streams_on
from server.scheduling.workers import PrefixChain, Worker
from triolet.config import RecoveryConfig, RoutingConfig
from triolet.ids import AttemptKey, Role
from triolet.service_class import ANYWHERE, Placement

from .fakes import LINK, FakeDecode, FakePrefill, make_request
from .test_dispatch import world_of

if TYPE_CHECKING:
    from .world import World

MOST = RoutingConfig().candidates
MANY = 40
"""Workers of each role: far more than a request compares."""
LONG = "a prompt that is long enough to matter to a cache of prefixes, of at least 64 tokens " * 2
ACME = Placement(pools=frozenset({"acme"}))


def key(number: int) -> AttemptKey:
    return AttemptKey(number.to_bytes(16, "big"), 0)


def fleet(num: int = MANY, **decode: int) -> World:
    return world_of(
        *(FakePrefill(f"p{n}") for n in range(num)),
        *(FakeDecode(f"d{n}", **decode) for n in range(num)),
    )


def of_role(world: World, role: Role) -> list[Worker]:
    return [worker for worker in world.workers if worker.role is role]


@pytest.mark.parametrize("num", [1, MOST, MOST + 1, MANY])
def test_a_request_compares_all_workers_of_a_small_fleet_and_few_of_a_large_one(num: int) -> None:
    world = fleet(num)
    pool = world.roster.pool(ANYWHERE)
    chain = PrefixChain(range(400), b"")
    for worker in world.workers:
        worker.prefixes.keep(chain, worker.capacity)
    some = world.roster.candidates(pool, Need(400, 400, chain=chain))
    assert (some is pool.workers) is (num <= MOST)
    for role in (Role.PREFILL, Role.DECODE):
        assert 1 <= sum(worker.role is role for worker in some) <= MOST


def test_a_prompt_goes_to_the_worker_of_a_large_fleet_that_holds_it() -> None:
    world = fleet()
    first = world.submit(make_request(1, prompt=LONG, max_tokens=4))
    pair = first.attempt.pair
    world.settle()
    for number in range(2, 12):
        again = world.submit(make_request(number, prompt=LONG + str(number), max_tokens=4))
        assert again.attempt.pair == pair
        world.settle()


def test_of_several_holders_the_longest_beginnings_are_compared() -> None:
    world = fleet()
    decodes = of_role(world, Role.DECODE)
    for worker, num_tokens in zip(decodes, (100, 400, 200, 80), strict=False):
        worker.prefixes.keep(PrefixChain(range(num_tokens), b""), worker.capacity)
    pool, need = world.roster.pool(ANYWHERE), Need(400, 400, chain=PrefixChain(range(400), b""))
    for _ in range(20):
        assert {decodes[1], decodes[2]} <= set(world.roster.candidates(pool, need))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_the_only_worker_with_room_is_found(role: Role) -> None:
    world = fleet(row_credit=1)
    for number, worker in enumerate(of_role(world, role)[:-1]):
        worker.reserve(key(number), num_tokens=10_000)
    route = world.submit(make_request(1)).attempt.pair
    assert route.of(role) is of_role(world, role)[-1]


def test_a_long_prompt_waits_for_the_only_prefill_worker_that_lives() -> None:
    world = fleet()
    *dead, alive = of_role(world, Role.PREFILL)
    for worker in dead:
        world.lose(worker)
    world.sweep(RoutingConfig().prefill_grace_s + 1.0)
    assert world.submit(make_request(1, prompt=LONG)).attempt.pair.prefill is alive


def test_workers_with_an_open_breaker_get_nothing_while_others_are_whole() -> None:
    world = fleet()
    broken = of_role(world, Role.DECODE)[: MANY // 2]
    for worker in broken:
        for number in range(RecoveryConfig().breaker_min_failures):
            worker.breaker.failed(world.now + number)
    used = {world.submit(make_request(number)).attempt.pair.decode for number in range(MANY)}
    assert used.isdisjoint(broken)


def test_half_of_a_large_pool_stays_in_use_if_all_breakers_are_open() -> None:
    world = fleet()
    for number, worker in enumerate(of_role(world, Role.DECODE)):
        for _ in range(RecoveryConfig().breaker_min_failures):
            worker.breaker.failed(world.now + number)
    used = {world.submit(make_request(number)).attempt.pair.decode for number in range(MANY)}
    assert used == set(of_role(world, Role.DECODE)[MANY // 2 :])


def test_kv_stays_in_its_zone_in_a_large_fleet() -> None:
    zones = ("a", "b", "c")
    world = world_of(
        *(FakePrefill(f"p{n}", labels={"zone": zones[n % 3]}) for n in range(MANY)),
        *(FakeDecode(f"d{n}", labels={"zone": zones[n % 3]}) for n in range(MANY)),
    )
    used: Counter[str] = Counter()
    for number in range(2 * MANY):
        decode, prefill = world.submit(make_request(number)).attempt.pair
        assert decode.site.zone == prefill.site.zone
        used[decode.site.zone] += 1
    assert max(used.values()) < 2 * min(used.values())


def test_streams_are_as_even_as_the_choice_of_a_few_allows() -> None:
    world = fleet(100, row_credit=64)
    for number in range(1600):
        world.submit(make_request(number, prompt=f"{number:04}"))
        world.deliver()
    streams = [streams_on(worker) for worker in of_role(world, Role.DECODE)]
    assert sum(streams) == 1600
    assert max(streams) <= 16 + 3, "full scans give 16; one random worker each about 27"


def test_a_worker_that_joins_gets_requests_and_one_that_left_gets_none() -> None:
    world = fleet(MOST + 1)
    first = world.roster.pool(ANYWHERE)
    left = of_role(world, Role.DECODE)[0]
    chain = PrefixChain(range(400), b"")
    left.prefixes.keep(chain, left.capacity)
    world.roster.remove(left)
    assert left not in world.roster.pool(ANYWHERE).workers
    joined = Worker(Role.DECODE, "mem://new", LINK, RecoveryConfig(), world.now)
    world.roster.add(joined)
    pool = world.roster.pool(ANYWHERE)
    assert joined in pool.workers
    assert pool is not first
    need = Need(400, 400, chain=chain)
    assert left not in world.roster.candidates(pool, need)
    assert not world.roster._holders[Role.DECODE]


def test_a_worker_that_comes_back_in_a_pool_is_not_shared_any_more() -> None:
    world = fleet(2)
    worker = of_role(world, Role.DECODE)[0]
    assert worker in world.roster.pool(ANYWHERE).workers
    world.of[worker].labels = {"pool": "acme"}
    world.greet(worker)
    assert worker not in world.roster.pool(ANYWHERE).workers
    assert worker in world.roster.pool(ACME).workers


def test_the_limits_follow_a_worker_that_restarts_smaller() -> None:
    world = fleet(1)
    before = world.roster.pool(ANYWHERE).limits
    world.of[of_role(world, Role.DECODE)[0]].num_blocks = 10
    world.greet(of_role(world, Role.DECODE)[0])
    after = world.roster.pool(ANYWHERE).limits
    assert after.pool_tokens is not None
    assert before.pool_tokens is not None
    assert after.pool_tokens < before.pool_tokens
    assert after.prefill_pool_tokens == before.prefill_pool_tokens


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 60)), max_size=40))
def test_holders_are_always_the_workers_that_hold_a_block(
    events: list[tuple[int, int, int]],
) -> None:
    workers = [Worker(Role.DECODE, f"mem://{n}", LINK, RecoveryConfig(), 0.0) for n in range(6)]
    roster = Roster(workers, 4096, 4, random.Random(1))
    for at, first, num_tokens in events:
        if num_tokens:
            names = PrefixChain(range(100 * first, 100 * first + num_tokens), b"").names(4)
            workers[at].prefixes.note(names, 9)
        else:
            workers[at].prefixes.clear()
    expected = {(name, worker) for worker in workers for name in worker.prefixes._recent}
    holders = roster._holders[Role.DECODE]
    assert {(name, one) for name, held in holders.items() for one in held} == expected
    assert all(len(set(held)) == len(held) for held in holders.values())
