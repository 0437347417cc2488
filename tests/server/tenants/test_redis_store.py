"""Tests of the account store in Redis: several servers share limits, also while Redis is away and
after it returns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import trio

from server.tenants import redis_scripts as scripts
from server.tenants.accounts import QuotaAsk, Settlement, TenantLimits
from server.tenants.redis_store import RedisStore
from tests.server.support.surface import until
from transport.redis_calls import with_calls

from .redis_server import running_redis
from .worlds import RedisWorld, unhurried

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from transport.redis_calls import RedisCalls

    from .redis_server import RedisServer

pytestmark = pytest.mark.slow

HOLDER = """
import sys, trio
from server.tenants.accounts import QuotaAsk, TenantLimits
from server.tenants.redis_store import RedisStore
from tests.server.tenants.fakes import RecordingObserver
from tests.server.tenants.worlds import unhurried

async def main():
    async with trio.open_nursery() as nursery:
        store = RedisStore(unhurried(sys.argv[1], lease_s=1.0), RecordingObserver(), "victim")
        await nursery.start(store.run)
        for number in range(5):
            await store.reserve(
                QuotaAsk(f"v{number}", "t", 10, 3), TenantLimits(tokens=60.0, concurrent=9)
            )
        print("reserved", flush=True)

trio.run(main)
"""


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path) as server:
        yield server


async def started(nursery: trio.Nursery, *worlds: RedisWorld) -> None:
    for world in worlds:
        await nursery.start(world.store.run)


async def admitted(
    world: RedisWorld, count: int, limits: TenantLimits, name: str = ""
) -> list[str]:
    ids = [f"{name}{number}" for number in range(count)]
    verdicts = {one: await world.store.reserve(QuotaAsk(one, "t", 1), limits) for one in ids}
    return [one for one, verdict in verdicts.items() if verdict.refused_by is None]


async def test_two_servers_enforce_one_limit(redis: RedisServer, nursery: trio.Nursery) -> None:
    a, b = RedisWorld(redis, "a"), RedisWorld(redis, "b")
    await started(nursery, a, b)
    limits, began_at, taken = TenantLimits(tokens=200.0), trio.current_time(), []

    async def ask(world: RedisWorld, name: str) -> None:
        taken.extend(await admitted(world, 150, limits, name))

    async with trio.open_nursery() as asking:
        asking.start_soon(ask, a, "a")
        asking.start_soon(ask, b, "b")
    refilled = (trio.current_time() - began_at) * 200 / 60
    assert 200 <= len(taken) <= 200 + refilled + 1
    nursery.cancel_scope.cancel()


async def test_one_server_is_told_of_each_crossing(
    redis: RedisServer, nursery: trio.Nursery
) -> None:
    a, b = RedisWorld(redis, "a"), RedisWorld(redis, "b")
    await started(nursery, a, b)
    limits = TenantLimits()
    for number in range(40):
        world = (a, b)[number % 2]
        world.store.settle(Settlement(f"{number}", "t", limits, 1, 10))
    await a.until("t", limits, lambda account: account.spent == 400)
    await until(lambda: a.store.num_reserved == 0 and max_spent(a, b) == 400)
    steps = sorted((before, after) for w in (a, b) for _, before, after in w.observer.spends)
    assert [before for before, _ in steps] == [0, *(after for _, after in steps[:-1])]
    nursery.cancel_scope.cancel()


def max_spent(*worlds: RedisWorld) -> int:
    return sum(after - before for w in worlds for _, before, after in w.observer.spends)


async def test_reservations_of_a_killed_server_are_given_back_once(
    redis: RedisServer, nursery: trio.Nursery
) -> None:
    victim = await trio.to_thread.run_sync(start_holder, redis.url)
    try:
        a, b = RedisWorld(redis, "a", lease_s=1.0), RedisWorld(redis, "b", lease_s=1.0)
        await started(nursery, a, b)
        limits = TenantLimits(tokens=60.0, concurrent=9)
        account = await a.store.account("t", limits)
        assert account.in_flight == 5
        os.kill(victim.pid, signal.SIGKILL)
        account = await a.until("t", limits, lambda account: account.in_flight == 0)
        assert account.tokens == pytest.approx(60.0)
        await a.store.reserve(QuotaAsk("next", "t", 50), limits)
        for _ in range(3):  # it is not released again
            await trio.sleep(0.06)
        account = await b.store.account("t", limits)
        assert account.in_flight == 1
        assert account.tokens < 60.0
        nursery.cancel_scope.cancel()
    finally:
        victim.kill()
        victim.communicate()


def start_holder(url: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, url], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == b"reserved":
            return process
    raise AssertionError("it has ended")


async def test_without_redis_each_holds_its_part_and_afterwards_they_agree(
    own_redis: RedisServer, nursery: trio.Nursery
) -> None:
    a, b = RedisWorld(own_redis, "a"), RedisWorld(own_redis, "b")
    await started(nursery, a, b)
    limits = TenantLimits(tokens=8.0, concurrent=100)
    await until(lambda: part_of(a) == part_of(b) == 0.5)
    [before] = await admitted(a, 1, limits, "before")
    await b.store.account("t", limits)
    own_redis.stop()
    # Heartbeats alone detect it, without a reservation.
    await until(lambda: not (a.store.is_well or b.store.is_well))
    began_at = trio.current_time()
    during = [await admitted(w, 9, limits, n) for w, n in ((a, "da"), (b, "db"))]
    refilled = (trio.current_time() - began_at) * 8 / 60
    # Each has half of a minute's eight, plus what is refilled.
    assert [4 <= len(ids) <= 4 + refilled + 1 for ids in during] == [True, True]
    assert a.store.enforced(limits) == limits.shared_by(2)
    # Reservations made in Redis are settled there, even if they end while it is away.
    a.store.settle(Settlement(before, "t", limits, 1, 100))
    for one in during[0]:
        a.store.settle(Settlement(one, "t", limits, 1, 10))
    own_redis.start()
    await until(lambda: a.store.is_well and b.store.is_well)
    # Requests that end afterwards are settled there too, although they were reserved locally.
    for one in during[1]:
        b.store.settle(Settlement(one, "t", limits, 1, 10))
    used = 1 + len(during[1])
    account = await a.until("t", limits, lambda account: account.used_tokens == used)
    assert (account.in_flight, account.spent) == (0, 100 + 10 * len(during[1]))
    assert account.tokens >= 8 - used - 0.01  # nothing else was charged
    assert account.tokens <= 8 - used + (trio.current_time() - began_at + 5) * 8 / 60 + 1
    assert [w.store.num_reserved for w in (a, b)] == [0, 0]
    seen_by_b = await b.store.account("t", limits)
    assert (seen_by_b.in_flight, seen_by_b.spent) == (account.in_flight, account.spent)
    nursery.cancel_scope.cancel()


def part_of(world: RedisWorld) -> float:
    assert isinstance(world.store, RedisStore)
    return 1 / world.store.num_servers


async def test_a_server_that_starts_without_redis_begins_alone(
    own_redis: RedisServer, nursery: trio.Nursery
) -> None:
    own_redis.stop()
    world = RedisWorld(own_redis)
    await started(nursery, world)
    limits = TenantLimits(requests=2.0, budget=10**9)
    assert not world.store.is_well
    assert len(await admitted(world, 4, limits)) == 2
    own_redis.start()
    await until(lambda: world.store.is_well)
    # Redis's state applies: nothing was charged there.
    assert (await world.store.account("t", limits)).requests == 2.0
    assert len(await admitted(world, 4, limits, "then")) == 2
    nursery.cancel_scope.cancel()


async def test_what_redis_holds_for_a_server_that_does_not_know_it_is_given_back(
    own_redis: RedisServer, nursery: trio.Nursery
) -> None:
    world, limits = RedisWorld(own_redis), TenantLimits(tokens=60.0, concurrent=9)
    await started(nursery, world)
    assert len(await admitted(world, 2, limits)) == 2
    own_redis.stop()
    await until(lambda: not world.store.is_well)
    assert isinstance(world.store, RedisStore)
    world.store._reserved.discard("0")  # as after a settlement that Redis lost
    own_redis.start()
    await until(lambda: world.store.is_well)
    account = await world.until("t", limits, lambda account: account.in_flight == 1)
    assert account.tokens >= 59.0
    assert world.store.num_reserved == 1
    nursery.cancel_scope.cancel()


async def test_who_ends_in_order_leaves_nothing_behind(
    redis: RedisServer, nursery: trio.Nursery
) -> None:
    limits = TenantLimits(tokens=100.0)
    world = RedisWorld(redis)
    async with trio.open_nursery() as own:
        await started(own, world)
        await world.store.reserve(QuotaAsk("1", "t", 10), limits)
        world.store.settle(Settlement("1", "t", limits, 7, 3))
        own.cancel_scope.cancel()  # at once: Redis was not told yet
    other = RedisWorld(redis, "b")
    await started(nursery, other)
    account = await other.store.account("t", limits)
    assert (account.in_flight, account.used_tokens, account.spent) == (0, 7, 3)
    assert redis.command("ZCARD", f"{scripts.PREFIX}servers").startswith(b":1")
    nursery.cancel_scope.cancel()


async def test_a_request_that_is_cancelled_while_it_asks_reserves_nothing(
    redis: RedisServer, nursery: trio.Nursery
) -> None:
    world, limits = RedisWorld(redis), TenantLimits(concurrent=5)
    await started(nursery, world)
    for number in range(5):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as asking:
                asking.start_soon(world.store.reserve, QuotaAsk(f"{number}", "t", 0), limits)
                await trio.lowlevel.checkpoint()
                await trio.lowlevel.checkpoint()
                scope.cancel()
    await world.until("t", limits, lambda account: account.in_flight == 0)
    assert world.store.num_reserved == 0
    nursery.cancel_scope.cancel()


async def with_redis(redis: RedisServer, use: Callable[[RedisCalls], Awaitable[Any]]) -> Any:  # noqa: ANN401
    found = []

    async def keep(calls: RedisCalls) -> None:
        found.append(await use(calls))

    await with_calls(
        keep,
        url=redis.url,
        scripts=scripts.SCRIPTS,
        first=(scripts.PREFIX, "s"),
        connect_timeout_s=30,
        call_timeout_s=30,
    )
    return found[0]


async def test_a_batch_that_is_sent_again_is_done_once_and_says_the_same(
    redis: RedisServer,
) -> None:
    change = {"id": "1", "tenant": "t", "requests": 1, "tokens": 5, "cost": 7, "once_id": ""}
    changes = json.dumps([change | {"request_limit": -1, "token_limit": 100}])

    async def apply_twice(calls: RedisCalls) -> list[str]:
        return [await calls.call(scripts.SETTLE, 1, changes, 60) for _ in range(2)]

    assert await with_redis(redis, apply_twice) == ['{"t":["0","7"]}'] * 2


async def test_work_that_is_computed_again_is_charged_once(
    redis: RedisServer, nursery: trio.Nursery
) -> None:
    a, b = RedisWorld(redis, "a"), RedisWorld(redis, "b", charged_once_s=60)
    await started(nursery, a, b)
    limits, costs = TenantLimits(), (30, 100, 100, 70)
    for number, cost in enumerate(costs):
        store = (a, b)[number % 2].store
        store.settle(Settlement(f"{number}", "t", limits, 2 * cost, cost, once_id="line"))
        await store.wait_saved()
        [spend_key] = redis.command("KEYS", f"{scripts.PREFIX}spend:*").split()[2:]
        assert f"{max(costs[: number + 1])}".encode() in redis.command(
            "HGET", spend_key.decode(), "t:n"
        ), "it is saved by then"
    b.store.settle(Settlement("other", "t", limits, 200, 100, once_id="other"))
    await b.store.wait_saved()
    account = await a.store.account("t", limits)
    assert (account.spent, account.used_tokens) == (200, 400)
    assert max_spent(a, b) == 200
    ttl = int(redis.command("TTL", f"{scripts.PREFIX}once:line").strip(b":\r\n"))
    assert 0 < ttl <= 60
    nursery.cancel_scope.cancel()


async def test_months_in_redis_are_those_of_utc(redis: RedisServer) -> None:
    days = [datetime(2023, 12, 30, tzinfo=UTC) + timedelta(n * 13.37) for n in range(200)]
    redis_clock = "redis.call('TIME')"
    assert redis_clock in scripts._HEAD
    for day in days:
        script = scripts._HEAD.replace(redis_clock, f"{{{int(day.timestamp())}, 0}}")
        answer = redis.command("EVAL", script + "\nreturn month()", "0", "p", "s")
        assert answer == b"$7\r\n%b\r\n" % day.strftime("%Y-%m").encode()


async def test_a_wrong_password_is_a_redis_that_is_away(
    redis: RedisServer, nursery: trio.Nursery
) -> None:
    world = RedisWorld(redis)
    wrong = redis.url.replace("rd%2F1", "xx")
    store = RedisStore(unhurried(wrong), world.observer, "a")
    await nursery.start(store.run)
    assert not store.is_well
    assert "xx" not in "".join(world.observer.failures)
    nursery.cancel_scope.cancel()
