"""Tests of `AnswerDirectory` with a real Redis: claims, dead servers, invalid values, and a Redis
that goes away."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
import structlog
import trio

from server.contract.generation import CancelReason
from server.peers.answer_directory import PREFIX, AnswerClaim, AnswerDirectory
from server.peers.answer_place import AnswerOwner, AnswerPlace
from tests.server.support.surface import CONFIG, PATIENCE_S, until
from triolet.config import HostsConfig, QuotaConfig, TenantsConfig

from .conftest import lease_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.server.tenants.redis_server import RedisServer

HERE: Final = AnswerOwner(AnswerPlace.HERE)
ALONE: Final = AnswerOwner(AnswerPlace.ALONE)
LOST: Final = AnswerOwner(AnswerPlace.LOST)


def url_of(host: str) -> str:
    return f"https://{host}.example"


def directory_of(redis: RedisServer, host: str, **times: float) -> AnswerDirectory:
    """Return a directory whose leases outlast the test and are renewed only when a test says so."""
    times = {"lease_s": 90.0, "renew_s": 60.0, "timeout_s": 30.0} | times
    hosts = HostsConfig(url_of(host), "unread", **times)
    tenants = TenantsConfig(quotas=QuotaConfig(limits=redis.url, connect_timeout_s=30))
    return AnswerDirectory(replace(CONFIG, hosts=hosts, tenants=tenants))


@asynccontextmanager
async def run(*directories: AnswerDirectory) -> AsyncIterator[trio.Nursery]:
    """Run directories until the end of the block."""
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for one in directories:
                await nursery.start(one.run)
            yield nursery
            nursery.cancel_scope.cancel()


async def claimed(
    directory: AnswerDirectory, digest: str = "k", *, is_kept: bool = True
) -> AnswerClaim:
    """Return the claim of a request that starts an answer."""
    claim = directory.claim(digest, lambda: is_kept)
    await claim.ask(is_resuming=False)
    return claim


async def owner(
    directory: AnswerDirectory, digest: str = "k", *, is_resuming: bool = False
) -> AnswerOwner:
    return await directory.owner_of(digest, is_resuming=is_resuming)


def let_expire(redis: RedisServer) -> None:
    """Let host a's lease expire while the other hosts renew theirs."""
    redis.command("DEL", lease_of(redis, url_of("a")), f"{PREFIX}settling")


def elsewhere(host: str) -> AnswerOwner:
    return AnswerOwner(AnswerPlace.ELSEWHERE, url_of(host))


async def test_of_two_that_claim_at_once_one_has_the_key(redis: RedisServer) -> None:
    both = {host: directory_of(redis, host) for host in "ab"}
    found: dict[str, dict[str, AnswerOwner]] = {}

    async def ask(host: str, digest: str) -> None:
        found.setdefault(digest, {})[host] = await owner(both[host], digest)

    async with run(*both.values()), trio.open_nursery() as nursery:
        for number in range(50):
            for host in ("ab", "ba")[number % 2]:
                nursery.start_soon(ask, host, f"{number}")
    for one in found.values():
        winner, loser = ("a", "b") if one["a"] == HERE else ("b", "a")
        assert one == {winner: HERE, loser: elsewhere(winner)}
    assert len(found) == 50


async def test_what_a_dead_server_had_is_lost_to_who_resumes_and_free_for_who_begins(
    redis: RedisServer,
) -> None:
    a, b = directory_of(redis, "a"), directory_of(redis, "b")
    async with run(a, b):
        assert await owner(a) == HERE
        assert await owner(b, is_resuming=True) == elsewhere("a")
        let_expire(redis)
        assert await owner(b, is_resuming=True) == LOST
        assert await owner(b, is_resuming=True) == LOST
        assert await owner(b) == HERE
        assert await owner(b, is_resuming=True) == HERE
        assert await owner(a) == ALONE  # unknown until it renews its lease


async def test_a_server_that_ends_is_dead_at_once(redis: RedisServer) -> None:
    a, b = directory_of(redis, "a"), directory_of(redis, "b")
    async with run(b):
        async with run(a):
            assert await owner(a) == HERE
        assert await owner(b, is_resuming=True) == LOST


async def test_a_successor_has_its_predecessors_keys_when_that_has_ended(
    redis: RedisServer,
) -> None:
    a, b, again = directory_of(redis, "a"), directory_of(redis, "b"), directory_of(redis, "a")
    async with run(b, again):
        async with run(a):
            for key in ("k", "kept"):
                assert await owner(a, key) == HERE
            for one in (again, b):
                assert await owner(one) == elsewhere("a")
            assert await owner(a) == HERE
        for one in (again, b):
            assert await owner(one, is_resuming=True) == LOST
        assert await owner(again) == HERE
        assert await owner(b) == elsewhere("a")
        assert await owner(b, "kept") == HERE


async def test_nothing_to_resume_claims_nothing(redis: RedisServer) -> None:
    a, b = directory_of(redis, "a"), directory_of(redis, "b")
    async with run(a, b):
        assert await owner(a, is_resuming=True) == ALONE
        assert await owner(b) == HERE


async def free_another(directory: AnswerDirectory, watcher: AnswerDirectory) -> None:
    """Make a directory free a key; all keys that it freed earlier are then free too."""
    (await claimed(directory, "another", is_kept=False)).cancel(CancelReason.CLIENT_GONE)
    while await owner(watcher, "another") != HERE:
        await trio.lowlevel.checkpoint()


async def test_a_key_is_free_again_after_its_last_request_if_no_answer_is_kept(
    redis: RedisServer,
) -> None:
    a, b = directory_of(redis, "a"), directory_of(redis, "b")
    async with run(a, b):
        first, second = await claimed(a, is_kept=False), await claimed(a, is_kept=False)
        with_answer = await claimed(a, "kept")
        for claim in (with_answer, first):
            claim.cancel(CancelReason.CLIENT_GONE)
        await free_another(a, b)
        assert await owner(b) == elsewhere("a")
        second.cancel(CancelReason.CLIENT_GONE)
        while await owner(b) != HERE:
            await trio.lowlevel.checkpoint()
        assert await owner(b, "kept") == elsewhere("a")


async def test_a_key_is_free_when_its_answer_is_no_longer_kept(redis: RedisServer) -> None:
    a, b, is_kept = directory_of(redis, "a", renew_s=0.02), directory_of(redis, "b"), True
    async with run(a, b):
        claim = a.claim("k", lambda: is_kept)
        await claim.ask(is_resuming=False)
        again, other = await claimed(a, "again"), await claimed(a, "other")
        for one in (claim, again, other):
            one.cancel(CancelReason.CLIENT_GONE)
        await claimed(a, "again")
        is_kept = False
        while await owner(b) != HERE:
            await trio.lowlevel.checkpoint()
        for digest in ("again", "other"):
            assert await owner(b, digest) == elsewhere("a")


async def test_a_key_that_is_claimed_again_at_once_stays(redis: RedisServer) -> None:
    a, b = directory_of(redis, "a"), directory_of(redis, "b")
    async with run(a, b):
        digests = [f"{number}" for number in range(20)]
        for claim in [await claimed(a, digest, is_kept=False) for digest in digests]:
            claim.cancel(CancelReason.CLIENT_GONE)
        for digest in digests:
            await claimed(a, digest)
        await free_another(a, b)
        for digest in digests:
            assert await owner(b, digest) == elsewhere("a")


async def test_a_key_that_another_host_took_over_is_not_freed(redis: RedisServer) -> None:
    a, b = directory_of(redis, "a"), directory_of(redis, "b")
    async with run(a, b):
        claim = await claimed(a, is_kept=False)
        let_expire(redis)
        assert await owner(b) == HERE
        claim.cancel(CancelReason.CLIENT_GONE)
        while await owner(a) == ALONE:  # it renews its lease after freeing keys
            await trio.lowlevel.checkpoint()
        assert await owner(a) == elsewhere("b")


async def test_values_of_another_form_count_as_absent(redis: RedisServer) -> None:
    a, b = directory_of(redis, "a"), directory_of(redis, "b")
    entry = f"{PREFIX}answer:k"
    async with run(a, b):
        for words in (
            ("SET", entry, "\xff \x00 x"),
            ("SET", entry, "one-word"),
            ("SET", entry, f"{'0' * 16} {PREFIX}beat"),
            ("RPUSH", entry, "a", "list"),
        ):
            redis.command("DEL", entry, f"{PREFIX}settling")
            redis.command(*words)
            assert await owner(b) == HERE
        assert await owner(a) == elsewhere("b")
        lease = lease_of(redis, url_of("a"))
        redis.command("DEL", lease)
        redis.command("RPUSH", lease, "x")
        assert await owner(a) == ALONE


async def test_after_redis_was_away_a_silent_server_is_not_dead_for_a_while(
    redis: RedisServer,
) -> None:
    a, b = directory_of(redis, "a"), directory_of(redis, "b")
    async with run(a):
        assert await owner(a) == HERE
        freed = await claimed(a, "other", is_kept=False)
        redis.command("DEL", lease_of(redis, url_of("a")), f"{PREFIX}beat")
        async with run(b):
            for is_resuming in (False, True):
                assert (await owner(b, is_resuming=is_resuming)).place is AnswerPlace.UNKNOWN
            freed.cancel(CancelReason.CLIENT_GONE)  # then it renews its lease, too
            while await owner(b) != elsewhere("a"):
                await trio.lowlevel.checkpoint()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_without_redis_every_server_is_alone_and_says_so_once(redis: RedisServer) -> None:
    a = directory_of(redis, "a", renew_s=0.2, timeout_s=5.0)
    # If Redis disconnects during the handshake, the library does not close its streams.
    with structlog.testing.capture_logs() as logs:
        async with run(a):
            assert await owner(a) == HERE
            redis.stop()
            while not logs:
                assert await owner(a, f"{trio.current_time()}") in (HERE, ALONE)
            for _ in range(10):
                assert await owner(a) == ALONE
            redis.start()
            await until(lambda: len(logs) == 2)
            assert await owner(a) == HERE
    assert [one["event"] for one in logs] == ["keys_are_local", "keys_are_shared"]


async def test_a_redis_that_is_away_at_the_start_holds_nothing_up(redis: RedisServer) -> None:
    redis.stop()
    try:
        async with run(a := directory_of(redis, "a")):
            assert await owner(a) == ALONE
    finally:
        redis.start()
