"""Tests that every account store must pass, in memory and in Redis."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from server.tenants.accounts import Limit, QuotaAsk, Settlement, TenantLimits

from .worlds import MemoryWorld, RedisWorld

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import trio

    from .worlds import World

SLOWLY = 5.0
"""A limit so low that a test's own duration refills almost nothing."""


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.slow)])
async def world(request: pytest.FixtureRequest, nursery: trio.Nursery) -> AsyncIterator[World]:
    made: World = MemoryWorld()
    if request.param == "redis":
        made = RedisWorld(request.getfixturevalue("redis"))
    await nursery.start(made.store.run)
    yield made
    nursery.cancel_scope.cancel()


async def taken(
    world: World, ask_id: str, limits: TenantLimits, tokens: int = 0, cost: int = 0
) -> bool:
    verdict = await world.store.reserve(QuotaAsk(ask_id, "t", tokens, cost), limits)
    return verdict.refused_by is None


async def test_as_many_requests_as_a_minute_has_may_come_at_once(world: World) -> None:
    limits = TenantLimits(requests=3)
    assert [await taken(world, f"{n}", limits) for n in range(4)] == [True, True, True, False]
    verdict = await world.store.reserve(QuotaAsk("4", "t", 0), limits)
    assert verdict.refused_by is Limit.REQUESTS
    assert 20.0 - SLOWLY < verdict.wait_s <= 20.0
    world.let_pass("t", verdict.wait_s)
    assert await taken(world, "5", limits)


async def test_another_tenant_is_not_concerned(world: World) -> None:
    limits = TenantLimits(requests=1)
    assert await taken(world, "1", limits)
    verdict = await world.store.reserve(QuotaAsk("2", "other", 0), limits)
    assert verdict.refused_by is None


async def test_what_was_reserved_too_much_is_given_back(world: World) -> None:
    limits = TenantLimits(tokens=10.0)
    assert await taken(world, "1", limits, tokens=10)
    assert not await taken(world, "2", limits, tokens=10)
    world.store.settle(Settlement("1", "t", limits, 4, 0))
    account = await world.until("t", limits, lambda account: account.in_flight == 0)
    assert 6.0 <= account.tokens < 6.0 + SLOWLY
    assert account.used_tokens == 4


async def test_what_was_used_beyond_that_is_a_debt(world: World) -> None:
    limits = TenantLimits(tokens=10.0)
    assert await taken(world, "1", limits, tokens=2)
    world.store.settle(Settlement("1", "t", limits, 30, 0))
    account = await world.until("t", limits, lambda account: account.in_flight == 0)
    assert -20.0 <= account.tokens < -20.0 + SLOWLY
    verdict = await world.store.reserve(QuotaAsk("2", "t", 1), limits)
    assert verdict.refused_by is Limit.TOKENS
    assert verdict.wait_s == pytest.approx(126, abs=30)


async def test_a_request_for_which_nothing_was_reserved_is_counted(world: World) -> None:
    limits = TenantLimits(requests=3, tokens=10.0)
    world.store.settle(Settlement("1", "t", limits, 0, 0))
    account = await world.until("t", limits, lambda account: account.requests < 2.9)
    assert account.requests == pytest.approx(2, abs=0.5)
    assert (account.tokens, account.in_flight, account.used_tokens) == (10.0, 0, 0)


async def test_what_was_never_begun_is_given_back_whole(world: World) -> None:
    limits = TenantLimits(requests=1.0, tokens=10.0, concurrent=1)
    assert await taken(world, "1", limits, tokens=10, cost=5)
    world.store.settle(Settlement("1", "t", limits, 0, 0, is_begun=False))
    account = await world.until("t", limits, lambda account: account.in_flight == 0)
    assert (account.requests, account.tokens, account.spent, account.used_tokens) == (1, 10, 0, 0)
    assert await taken(world, "2", limits, tokens=10)


async def test_who_wants_more_than_a_minute_has_gets_a_full_one_and_owes_the_rest(
    world: World,
) -> None:
    limits = TenantLimits(tokens=10.0)
    verdict = await world.store.reserve(QuotaAsk("1", "t", 40), limits)
    assert verdict.refused_by is None
    assert -30.0 <= verdict.account.tokens < -30.0 + SLOWLY


async def test_only_so_many_are_in_flight(world: World) -> None:
    limits = TenantLimits(concurrent=2)
    assert [await taken(world, f"{n}", limits) for n in range(3)] == [True, True, False]
    verdict = await world.store.reserve(QuotaAsk("x", "t", 0), limits)
    assert (verdict.refused_by, verdict.account.in_flight) == (Limit.CONCURRENT, 2)
    world.store.settle(Settlement("0", "t", limits, 1, 0))
    await world.until("t", limits, lambda account: account.in_flight == 1)
    assert await taken(world, "y", limits)


async def test_a_budget_holds_for_what_is_spent_and_for_what_is_under_way(world: World) -> None:
    limits = TenantLimits(budget=100)
    assert await taken(world, "1", limits, cost=60)
    assert await taken(world, "2", limits, cost=60)
    assert not await taken(world, "3", limits, cost=1)
    world.store.settle(Settlement("1", "t", limits, 1, 20))
    world.store.settle(Settlement("2", "t", limits, 1, 20))
    account = await world.until("t", limits, lambda account: account.in_flight == 0)
    assert account.spent == 40
    assert await taken(world, "4", limits, cost=1)
    world.store.settle(Settlement("4", "t", limits, 1, 60))
    await world.until("t", limits, lambda account: account.in_flight == 0)
    verdict = await world.store.reserve(QuotaAsk("5", "t", 0), limits)
    assert verdict.refused_by is Limit.BUDGET
    assert world.observer.spends[0][1] == 0
    assert world.observer.spends[-1][2] == 100
    ends = [after for _, _, after in world.observer.spends]
    assert [before for _, before, _ in world.observer.spends] == [0, *ends[:-1]]


async def test_what_is_charged_is_what_was_used(world: World) -> None:
    """Whatever was reserved, in whatever order requests end, with or without a reservation."""
    random, limits = Random(5), TenantLimits(tokens=1e9, concurrent=1000)
    ids = [f"{n}" for n in range(60)]
    for one in ids:
        assert await taken(world, one, limits, tokens=random.randint(1, 500), cost=7)
    assert world.store.num_reserved == len(ids)
    random.shuffle(ids)
    used = [random.randint(0, 900) for _ in ids]
    for one, tokens in zip(ids, used, strict=True):
        world.store.settle(Settlement(one, "t", limits, tokens, 3 * tokens))
    world.store.settle(Settlement("unknown", "t", limits, 11, 33))
    total = sum(used) + 11
    account = await world.until("t", limits, lambda account: account.used_tokens == total)
    assert (account.in_flight, account.spent) == (0, 3 * total)
    assert world.store.num_reserved == 0


async def test_what_is_seen_is_the_account(world: World) -> None:
    limits = TenantLimits(requests=4.0, tokens=100.0)
    verdict = await world.store.reserve(QuotaAsk("1", "t", 40), limits)
    seen = world.store.last_seen("t", limits)
    assert seen is not None
    assert seen.requests >= verdict.account.requests
    assert seen.tokens == pytest.approx(verdict.account.tokens, abs=SLOWLY)
    assert world.store.enforced(limits) == limits
    assert world.store.is_well


async def test_a_limit_that_came_meanwhile_is_not_undone_by_what_ends(world: World) -> None:
    lax, tight = TenantLimits(), TenantLimits(requests=9.0, tokens=10.0)
    assert await taken(world, "old", lax, tokens=500)
    assert await taken(world, "new", tight, tokens=8)
    world.store.settle(Settlement("old", "t", tight, 1, 0))
    account = await world.until("t", tight, lambda account: account.used_tokens == 1)
    assert 1.0 <= account.tokens < 1.0 + SLOWLY
    assert 7.0 <= account.requests < 7.0 + SLOWLY
    # A request that ends without a limit leaves the bucket unchanged for a later limit.
    world.store.settle(Settlement("older", "t", lax, 8, 0))
    account = await world.until("t", tight, lambda account: account.used_tokens == 9)
    assert account.tokens < 1.0 + SLOWLY
