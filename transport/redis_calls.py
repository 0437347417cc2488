"""`RedisCalls`: calls Lua scripts on a Redis connection, with deadlines.

Each script is one round trip and one transaction.
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

from triolet.errors import TrioletError, said_by

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

DEFAULT_PORT = 6379
_STREAM_ENDS = (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream)


class StoreGone(TrioletError):
    """A call to Redis failed, or its reply was lost."""


class RedisCalls:
    """A connected Redis client with the scripts loaded.

    Args:
      client: the connected client.
      digests: digest of each script.
      first: the first arguments of every call.
      timeout_s: timeout of a call.
    """

    def __init__(
        self,
        client: coredis.Redis[str],
        digests: dict[str, str],
        first: Sequence[str],
        timeout_s: float,
    ) -> None:
        self._client = client
        self._digests = digests
        self._first = first
        self._timeout_s = timeout_s

    async def call(self, script: str, *arguments: str | float) -> Any:  # noqa: ANN401 (Redis')
        """Run a script with the first arguments and further ones.

        Raises:
          StoreGone: the script may or may not have run.
        """
        shown = [*self._first, *(_shown(argument) for argument in arguments)]
        with trio.move_on_after(self._timeout_s):
            return await _mapped(
                lambda: self._client.evalsha(self._digests[script], keys=None, args=shown)
            )
        raise StoreGone(f"Redis did not answer within {self._timeout_s} s")


def _shown(argument: str | float) -> str:
    return argument if isinstance(argument, str) else repr(argument)


async def with_calls(
    use: Callable[[RedisCalls], Awaitable[None]],
    *,
    url: str,
    scripts: Sequence[str],
    first: Sequence[str],
    connect_timeout_s: float,
    call_timeout_s: float,
) -> None:
    """Connect, load the scripts, run `use` with the connection, then disconnect.

    Args:
      use: works with the connection.
      url: `redis://`, `rediss://` or `unix://`, with the password if there is one.
      scripts: the scripts that `use` may call.
      first: the first arguments of every call.
      connect_timeout_s: for a new connection with its handshake.
      call_timeout_s: for one round trip.

    Raises:
      StoreGone: Redis cannot be reached, or `use` raised it.
    """
    parts = urlsplit(url)
    # Connect first, because the library leaks streams when it cannot connect.
    pool = ConnectionPool(
        connection_class=OpenConnection,
        location=OpenPlace(await _open(url, connect_timeout_s), f"{parts.hostname or parts.path}"),
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
        # A cancelled `use` still sends its last batch, so do not close the client before it.
        with trio.CancelScope(shield=True):
            async with client:
                try:
                    with of_use:
                        digests = await _load(client, scripts, connect_timeout_s)
                        await use(RedisCalls(client, digests, first, call_timeout_s))
                except StoreGone as error:
                    gone = error  # the client's nursery would wrap it in a group
        nursery.cancel_scope.cancel()
    if gone is not None:
        raise gone


async def _cancel_with_us(scope: trio.CancelScope) -> None:
    try:
        await trio.sleep_forever()
    finally:
        scope.cancel()


async def _open(url: str, timeout_s: float) -> ByteStream:
    parts = urlsplit(url)
    with trio.move_on_after(timeout_s):
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
            # A stream error means that the other side closed during the TLS handshake.
            raise StoreGone(f"Redis cannot be reached: {said_by(error)}") from error
    raise StoreGone(f"Redis accepted no connection within {timeout_s} s")


async def _load(
    client: coredis.Redis[str], scripts: Sequence[str], timeout_s: float
) -> dict[str, str]:
    with trio.move_on_after(timeout_s):
        digests = {}
        for script in scripts:
            digests[script] = await _mapped(lambda text=script: client.script_load(text))  # type: ignore[misc]
        return digests
    raise StoreGone(f"Redis did not answer within {timeout_s} s")


async def _mapped(call: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ANN401 (Redis')
    try:
        return await call()
    except (RedisError, OSError, RuntimeError, *_STREAM_ENDS) as error:
        # OSError includes timeouts. The library's pool raises RuntimeError while it closes.
        raise StoreGone(said_by(error)) from error


@dataclass(unsafe_hash=True)
class OpenPlace(Location):
    """Stands in for the address of a connection that is already open.

    Attributes:
      stream: the connection.
      name: the server's name, for messages.
    """

    stream: ByteStream
    name: str

    def __repr__(self) -> str:
        return self.name

    async def check(self) -> bool:
        """Return True: the connection is open."""
        return True


class OpenConnection(BaseConnection):
    """Speaks Redis's protocol over an open stream, once. See `BaseConnection`."""

    location: OpenPlace

    async def _connect(self) -> ByteStream:
        stream, self.location.stream = self.location.stream, CallEnded()
        return stream

    def describe(self) -> str:
        """Return a description."""
        return f"OpenConnection<{self.location}>"


class CallEnded(ByteStream):
    """The stream of a connection that has been used."""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Raise EndOfStream."""
        raise anyio.EndOfStream

    async def send(self, item: bytes) -> None:
        """Raise BrokenResourceError."""
        raise anyio.BrokenResourceError

    async def send_eof(self) -> None:
        """Do nothing: the stream is closed."""

    async def aclose(self) -> None:
        """Do nothing: the stream is closed."""
