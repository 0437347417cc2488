"""What a Redis may do that leaves in the middle: it is away, and nothing worse."""

from __future__ import annotations

import ssl
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import trio
import trio.testing

from server.tenants.accounts import Account, Ask, Limits
from server.tenants.local_share import LocalShare
from server.tenants.redis_calls import RedisCalls, StoreGone, with_calls
from server.tenants.redis_store import RedisStore
from triolet.config import QuotaConfig

from .fakes import RecordingObserver

if TYPE_CHECKING:
    import coredis


async def test_a_redis_that_leaves_in_the_handshake_of_tls_is_away() -> None:
    async def leave(stream: trio.SocketStream) -> None:
        await stream.aclose()

    async def use(calls: RedisCalls) -> None:
        raise AssertionError(calls)

    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, leave, 0, host="127.0.0.1")
        [listener] = await nursery.start(serve)
        port = listener.socket.getsockname()[1]
        config = QuotaConfig(limits=f"rediss://127.0.0.1:{port}", connect_timeout_s=30)
        with pytest.raises(StoreGone):
            await with_calls(config, "a", use)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the pool has ended"),
        anyio.BrokenResourceError(),
        anyio.EndOfStream(),
        ssl.SSLError(),
    ],
)
async def test_whatever_the_library_says_a_lost_call_is_a_redis_that_is_away(
    error: Exception,
) -> None:
    class Client:
        async def evalsha(self, digest: str, **arguments: Any) -> None:  # noqa: ANN401
            raise error

    client: coredis.Redis[str] = Client()  # type: ignore[assignment]
    with pytest.raises(StoreGone):
        await RedisCalls(client, {"s": "d"}, "a", 30.0).call("s")


class Stalled:
    """Calls that all fail once a test says so."""

    def __init__(self) -> None:
        self.gone = trio.Event()

    async def call(self, script: str, *arguments: str | float) -> None:
        await self.gone.wait()
        raise StoreGone("it stood still")


async def test_one_standstill_is_one_failure(autojump_clock: trio.abc.Clock) -> None:
    store = RedisStore(QuotaConfig(limits="redis://h"), RecordingObserver(), "a")
    limits = Limits(requests=100.0)
    for number in range(1, 4):
        assert store.is_well or number == 1
        stalled = Stalled()
        store._calls = stalled  # type: ignore[assignment]
        async with trio.open_nursery() as nursery:
            for request in range(5):
                nursery.start_soon(store.reserve, Ask(f"{number}.{request}", "t", 1), limits)
            await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(1)
            stalled.gone.set()
        await trio.sleep(1)
        assert store._failures == number
    assert not store.is_well


def test_servers_that_hear_nothing_of_one_another_share_what_is_left_of_a_budget() -> None:
    local, limits = LocalShare(), Limits(budget=100)
    seen = Account(0.0, 0.0, 0, 40, 0)
    local.open("t", limits, 3, seen, "2031-07")
    for number, is_taken in ((1, True), (2, False)):
        verdict = local.reserve(Ask(f"{number}", "t", 1, 20), "2031-07", 0.0)
        assert (verdict.refused_by is None) is is_taken
    local.open("t", Limits(budget=160), 3, None, "2031-07")
    assert local.reserve(Ask("3", "t", 1, 20), "2031-07", 0.0).refused_by is None
