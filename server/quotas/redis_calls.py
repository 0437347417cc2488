"""Calls of our scripts in Redis: the one place that knows coredis.

A client has one connection, which all calls share, and is thrown away with it when that is lost. We
open it ourselves, because the library leaves something behind of each attempt that fails, and of
each that is given up.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import anyio
import coredis
import trio
from anyio.abc import ByteStream
from coredis.connection import BaseConnection, Location
from coredis.exceptions import RedisError
from coredis.pool import ConnectionPool
from coredis.retry import NoRetryPolicy

from triolet.errors import TrioletError

from .scripts import APPLY, BEAT, LEAVE, PREFIX, RESERVE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from triolet.config_quotas import QuotaConfig

DEFAULT_PORT = 6379
_STREAM_ENDS = (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream)


class StoreGone(TrioletError):
    """Redis did not do what it was asked, or nobody knows whether it did."""


class RedisCalls:
    """A connected client, with our scripts loaded.

    Args:
      client: connected.
      digests: of the scripts, as Redis names them.
      server: who calls.
      timeout_s: for a call.
    """

    def __init__(
        self, client: coredis.Redis[str], digests: dict[str, str], server: str, timeout_s: float
    ) -> None:
        self._client = client
        self._digests = digests
        self._server = server
        self._timeout_s = timeout_s

    async def call(self, script: str, *arguments: str | float) -> Any:  # noqa: ANN401 (Redis')
        """Run a script; it is told prefix, server and the arguments.

        Raises:
          StoreGone: it may have been run, or not.
        """
        shown = [PREFIX, self._server, *(_shown(argument) for argument in arguments)]
        with trio.move_on_after(self._timeout_s):
            return await _mapped(
                lambda: self._client.evalsha(self._digests[script], keys=None, args=shown)
            )
        raise StoreGone(f"it did not answer within {self._timeout_s} s")


def _shown(argument: str | float) -> str:
    return argument if isinstance(argument, str) else repr(argument)


async def with_calls(
    config: QuotaConfig, server: str, use: Callable[[RedisCalls], Awaitable[None]]
) -> None:
    """Connect, load the scripts and use them; then disconnect.

    Raises:
      StoreGone: it cannot be reached, or `use` raised that.
    """
    parts = urlsplit(config.limits)
    pool = ConnectionPool(
        connection_class=OpenConnection,
        location=OpenPlace(await _open(config), f"{parts.hostname or parts.path}"),
        max_connections=1,
        decode_responses=True,
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        db=int(parts.path[1:] or 0) if parts.scheme != "unix" else 0,
    )
    client = coredis.Redis(
        connection_pool=pool,
        decode_responses=True,
        verify_version=False,
        retry_policy=NoRetryPolicy(),
    )
    gone: StoreGone | None = None
    of_use = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cancel_with_us, of_use)
        # Whoever is cancelled has last words for Redis; the client must not end before them.
        with trio.CancelScope(shield=True):
            async with client:
                try:
                    with of_use:
                        digests = await _load(client, config.connect_timeout_s)
                        await use(RedisCalls(client, digests, server, config.call_timeout_s))
                except StoreGone as error:
                    gone = error  # out of the client's nursery it would come in a group
        nursery.cancel_scope.cancel()
    if gone is not None:
        raise gone


async def _cancel_with_us(scope: trio.CancelScope) -> None:
    try:
        await trio.sleep_forever()
    finally:
        scope.cancel()


async def _open(config: QuotaConfig) -> ByteStream:
    parts = urlsplit(config.limits)
    with trio.move_on_after(config.connect_timeout_s):
        try:
            if parts.scheme == "unix":
                return await anyio.connect_unix(parts.path)
            host, port = parts.hostname or "", parts.port or DEFAULT_PORT
            if parts.scheme == "rediss":
                return await anyio.connect_tcp(
                    host,
                    port,
                    ssl_context=ssl.create_default_context(),
                    tls_standard_compatible=False,
                )
            return await anyio.connect_tcp(host, port)
        except (OSError, *_STREAM_ENDS) as error:
            # The latter: the other side left in the handshake of TLS.
            raise StoreGone(f"it cannot be reached: {type(error).__name__} {error}") from error
    raise StoreGone(f"no connection within {config.connect_timeout_s} s")


async def _load(client: coredis.Redis[str], timeout_s: float) -> dict[str, str]:
    with trio.move_on_after(timeout_s):
        digests = {}
        for script in (RESERVE, APPLY, BEAT, LEAVE):
            digests[script] = await _mapped(lambda text=script: client.script_load(text))  # type: ignore[misc]
        return digests
    raise StoreGone(f"no answer within {timeout_s} s")


async def _mapped(call: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ANN401 (Redis')
    try:
        return await call()
    except (RedisError, OSError, RuntimeError, *_STREAM_ENDS) as error:
        # OSError: also timeouts. RuntimeError: the library's pool, when it ends meanwhile.
        raise StoreGone(f"{type(error).__name__}: {error}") from error


@dataclass(unsafe_hash=True)
class OpenPlace(Location):
    """Where a connection leads that is open already.

    Attributes:
      stream: the connection.
      name: for people.
    """

    stream: ByteStream
    name: str

    def __repr__(self) -> str:
        return self.name

    async def check(self) -> bool:
        """Whether it could be connected to: it was."""
        return True


class OpenConnection(BaseConnection):
    """The protocol over a stream that is open, once. See `BaseConnection`."""

    location: OpenPlace

    async def _connect(self) -> ByteStream:
        stream, self.location.stream = self.location.stream, Ended()
        return stream

    def describe(self) -> str:
        """Name it."""
        return f"OpenConnection<{self.location}>"


class Ended(ByteStream):
    """What follows a connection that was lost: nothing."""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Say that nothing comes."""
        raise anyio.EndOfStream

    async def send(self, item: bytes) -> None:
        """Say that nobody is there."""
        raise anyio.BrokenResourceError

    async def send_eof(self) -> None:
        """Nobody is there."""

    async def aclose(self) -> None:
        """Nothing is open."""
