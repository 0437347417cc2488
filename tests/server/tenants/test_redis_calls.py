"""Tests of a Redis that disappears during a call: it counts as away, and nothing worse happens."""

from __future__ import annotations

import ssl
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import trio
import trio.testing

from server.tenants.accounts import QuotaAsk, Settlement, TenantLimits
from server.tenants.redis_store import RedisStore
from transport.redis_calls import RedisCalls, StoreGone, with_calls
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
        url = f"rediss://127.0.0.1:{port}"
        with pytest.raises(StoreGone):
            await with_calls(
                use, url=url, scripts=(), first=(), connect_timeout_s=30, call_timeout_s=30
            )
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
        await RedisCalls(client, {"s": "d"}, ("a",), 30.0).call("s")


class Stalled:
    """Calls that all fail once a test says so."""

    def __init__(self) -> None:
        self.gone = trio.Event()

    async def call(self, script: str, *arguments: str | float) -> None:
        await self.gone.wait()
        raise StoreGone("it stood still")


async def test_one_standstill_is_one_failure(autojump_clock: trio.abc.Clock) -> None:
    store = RedisStore(QuotaConfig(limits="redis://h"), RecordingObserver(), "a")
    limits = TenantLimits(requests=100.0)
    for number in range(1, 4):
        assert store.is_well or number == 1
        stalled = Stalled()
        store._calls = stalled  # type: ignore[assignment]
        async with trio.open_nursery() as nursery:
            for request in range(5):
                nursery.start_soon(store.reserve, QuotaAsk(f"{number}.{request}", "t", 1), limits)
            await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(1)
            stalled.gone.set()
        await trio.sleep(1)
        assert store._failures == number
    assert not store.is_well


class Spent:
    """Calls that report that a tenant has spent 40."""

    async def call(self, script: str, *arguments: str | float) -> list[str]:
        return ["", "0", "0", "0", "0", "40", "0"]


async def test_servers_that_hear_nothing_of_one_another_share_what_is_left_of_a_budget() -> None:
    store = RedisStore(QuotaConfig(limits="redis://h", servers=3), RecordingObserver(), "a")
    store._calls = Spent()  # type: ignore[assignment]
    assert (await store.account("t", TenantLimits(budget=100))).spent == 40
    store._calls = None
    for number, budget, is_taken in ((1, 100, True), (2, 100, False), (3, 160, True)):
        verdict = await store.reserve(
            QuotaAsk(f"{number}", "t", 1, 20), TenantLimits(budget=budget)
        )
        assert (verdict.refused_by is None) is is_taken
    store.settle(Settlement("1", "t", TenantLimits(budget=100), 1, 5))
    account = await store.account("t", TenantLimits(budget=100))
    assert (account.spent, account.used_tokens, account.in_flight) == (45, 1, 1)
