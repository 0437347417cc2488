"""What a Redis may do that leaves in the middle: it is away, and nothing worse."""

from __future__ import annotations

import ssl
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import trio

from server.quotas.redis_calls import RedisCalls, StoreGone, with_calls
from triolet.config_quotas import QuotaConfig

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
