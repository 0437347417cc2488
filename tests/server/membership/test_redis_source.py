"""Tests of `RedisSource` with a real Redis: workers that register, and a Redis that is away, empty
or full of garbage."""

from __future__ import annotations

import json
import os
import signal
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
from structlog.testing import capture_logs

from server.membership.member_table import MemberTable
from server.membership.redis_source import RedisSource
from tests.server.support.surface import until
from tests.server.tenants.redis_server import running_redis
from transport.registrations import (
    MAX_BYTES,
    REGISTER,
    RegistrationCalls,
    written_registration,
)
from triolet.config.members import Member, Members
from triolet.config.membership import MembershipConfig, RedisMembersConfig
from triolet.errors import ConfigError
from triolet.ids import Role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.server.tenants.redis_server import RedisServer

KEY = "{triolet}:own:members"
OFTEN_S = 0.01
TTL_S = 0.3
A, B = Member(Role.DECODE, "tcp://10.0.0.1:1"), Member(Role.PREFILL, "tcp://10.0.0.2:1", "chat")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path) as server:
        yield server


class Followed:
    """A source that polls Redis at a short interval.

    Attributes:
      source: the source.
      changes: the members after each change.
      alive: addresses of live workers.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.config = RedisMembersConfig(url=url, fleet="own", timeout_s=timeout_s)
        self.changes: list[set[Member]] = []
        self.alive: set[str] = set()
        config = MembershipConfig(redis=self.config, redis_poll_s=OFTEN_S)
        table = MemberTable((), lambda: self.alive)
        self.source = RedisSource(config, table, ["", "chat"])

    def use(self, members: Members) -> None:
        self.changes.append({*members.members})

    async def register(self, member: Member, ttl_s: float = TTL_S) -> None:
        """Register a worker and renew its registration."""
        calls = RegistrationCalls(self.config, "worker.membership.redis.url")
        text = written_registration(member, {"zone": "z1"})
        await calls.repeat(OFTEN_S, REGISTER, text, ttl_s)


@asynccontextmanager
async def following(url: str, timeout_s: float = 30.0) -> AsyncIterator[Followed]:
    one = Followed(url, timeout_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.source.run, one.use)
        yield one
        nursery.cancel_scope.cancel()


async def test_a_registered_worker_is_a_member_until_it_ends_and_heartbeats_miss_it(
    redis: RedisServer,
) -> None:
    async with following(redis.url) as one, trio.open_nursery() as workers:
        workers.start_soon(one.register, A)
        await until(lambda: one.changes == [{A}])
        one.alive = {A.address, B.address}
        async with trio.open_nursery() as ending:
            ending.start_soon(one.register, B)
            await until(lambda: one.changes == [{A}, {A, B}])
            assert json.loads(redis.command("ZRANGE", KEY, "0", "0").splitlines()[2])["labels"]
            ending.cancel_scope.cancel()
        await until(lambda: redis.command("ZCARD", KEY) == b":1\r\n")
        ended_at = trio.current_time()
        await until(lambda: one.source.health.answered_at > ended_at + OFTEN_S)
        assert len(one.changes) == 2
        one.alive.remove(B.address)
        await until(lambda: one.changes == [{A}, {A, B}, {A}])
        workers.cancel_scope.cancel()


async def test_a_redis_that_dies_and_comes_back_empty_changes_nothing(redis: RedisServer) -> None:
    async with following(redis.url) as one, trio.open_nursery() as workers:
        with capture_logs() as lines:
            workers.start_soon(one.register, A)
            workers.start_soon(one.register, B)
            await until(lambda: one.changes[-1:] == [{A, B}])
            one.alive = {A.address, B.address}
            lines.clear()
            redis.stop()
            await until(lambda: len(lines) == 3)
            await trio.sleep(20 * OFTEN_S)
            redis.start()
            await until(lambda: len(lines) == 6)
            redis.command("FLUSHALL")
            await until(lambda: redis.command("ZCARD", KEY) == b":2\r\n")
        assert one.changes[-1] == {A, B}
        events = [line["event"] for line in lines[:6]]
        assert events == 3 * ["membership_store_failed"] + 3 * ["membership_store_answers"]
        assert "p%s" not in str(lines)
        workers.cancel_scope.cancel()


async def test_a_redis_that_hangs_is_a_redis_that_is_away(redis: RedisServer) -> None:
    async with following(redis.url, timeout_s=0.2) as one, trio.open_nursery() as workers:
        workers.start_soon(one.register, A, 30.0)
        await until(lambda: one.changes == [{A}])
        assert redis._process is not None
        with capture_logs() as lines:
            os.kill(redis._process.pid, signal.SIGSTOP)
            await until(lambda: len(lines) == 2)
            os.kill(redis._process.pid, signal.SIGCONT)
            await until(lambda: len(lines) >= 4)
        assert one.changes == [{A}]
        workers.cancel_scope.cancel()


GARBAGE = {
    "not JSON": "is not a registration",
    "[" * 1_000: "is not a registration",
    "é": "'' is not a registration",
    json.dumps({"role": "decode", "address": "tcp://h:1", "x": "x" * MAX_BYTES}): "'' is not",
    '{"role": "judge", "address": "tcp://h:1"}': "Invalid enum value",
    '{"role": "server", "address": "tcp://h:1"}': "the role of tcp://h:1 is server",
    '{"role": "decode", "address": "http://h:1"}': "no known form",
    '{"role": "decode", "address": "tcp://0.0.0.0:1"}': "cannot connect",
    '{"role": "decode", "address": "ipc:///d/\\u0000"}': "absolute and printable",
    '{"role": "decode", "address": "tcp://h:1", "model": "x"}': "the model of tcp://h:1 is 'x'",
    '{"role": "prefill", "address": "tcp://10.0.0.1:1"}': "registered twice",
}


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_is_ignored_with_one_line(redis: RedisServer, garbage: str) -> None:
    redis.command("ZADD", KEY, "1", garbage)  # expired long ago
    redis.command("ZADD", KEY, "5e9", garbage)
    redis.command("ZADD", KEY, "6e9", written_registration(A, {}))
    with capture_logs() as lines:
        async with following(redis.url) as one:
            await until(lambda: bool(lines) and one.changes == [{A}])
            await trio.sleep(10 * OFTEN_S)
    [line] = lines
    assert (line["event"], line["count"]) == ("registrations_ignored", 1)
    assert GARBAGE[garbage] in line["first"]


async def test_a_key_of_another_kind_and_bytes_that_are_no_text_change_nothing(
    redis: RedisServer,
) -> None:
    redis.command("SET", KEY, "x")
    with capture_logs() as lines:
        async with following(redis.url) as one, trio.open_nursery() as workers:
            await until(lambda: bool(lines))
            assert "wrong kind of value" in lines[0]["reason"]
            redis.command("EVAL", rf"redis.call('DEL', '{KEY}')", "0")
            redis.command("EVAL", rf"redis.call('ZADD', '{KEY}', 5e9, '\255\254')", "0")
            workers.start_soon(one.register, A)
            await until(lambda: one.changes == [{A}])
            workers.cancel_scope.cancel()


async def test_another_fleet_in_the_same_redis_is_not_seen(redis: RedisServer) -> None:
    async with following(redis.url) as one, trio.open_nursery() as workers:
        other = Followed(redis.url, 30.0)
        other.config = RedisMembersConfig(url=redis.url, fleet="other", timeout_s=30.0)
        workers.start_soon(other.register, B)
        await until(lambda: redis.command("EXISTS", "{triolet}:other:members") == b":1\r\n")
        workers.start_soon(one.register, A)
        await until(lambda: bool(one.changes))
        assert one.changes == [{A}]
        workers.cancel_scope.cancel()


@pytest.mark.parametrize(
    "spoken", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 64, b"+OK\r\n", b"*9\r\n:1\r\n", b""]
)
async def test_a_peer_that_is_no_redis_is_a_redis_that_is_away(spoken: bytes) -> None:
    async def speak(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):  # the client is gone
            await stream.receive_some()
            await stream.send_all(spoken or b"-ERR no\r\n")
            await stream.receive_some()

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, speak, 0, host="127.0.0.1"))
        url = f"redis://127.0.0.1:{listener.socket.getsockname()[1]}"
        with capture_logs() as lines:
            async with following(url, timeout_s=0.2) as one, trio.open_nursery() as workers:
                workers.start_soon(one.register, A)
                await until(lambda: len(lines) == 2)
                await trio.sleep(10 * OFTEN_S)
                workers.cancel_scope.cancel()
        assert [line["event"] for line in lines] == 2 * ["membership_store_failed"]
        nursery.cancel_scope.cancel()


def test_a_worker_refuses_to_register_what_servers_could_not_use() -> None:
    with pytest.raises(ConfigError, match="cannot connect"):
        written_registration(Member(Role.DECODE, "tcp://0.0.0.0:1"), {})


async def test_the_url_may_be_in_a_file(redis: RedisServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.membership\.redis\.url names cannot be read"):
        Followed(f"@{tmp_path / 'missing'}", 30.0)
    (tmp_path / "url").write_text(redis.url + "\n")
    async with following(f"@{tmp_path / 'url'}") as one, trio.open_nursery() as workers:
        workers.start_soon(one.register, A)
        await until(lambda: one.changes == [{A}])
        workers.cancel_scope.cancel()
