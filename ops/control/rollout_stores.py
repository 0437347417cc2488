"""Where control keeps rollouts: its journal (SQLite), or the Redis of a fleet on several hosts.

Both keep the latest rollout of each model with a number that grows with each write. A write is
refused if another control has written since, so that of two controls only one goes on.
"""

from __future__ import annotations

import secrets
import sqlite3
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec

from transport.redis_calls import StoreGone
from transport.registrations import RegistrationCalls
from triolet.errors import TrioletError, said_by
from triolet.sqlite import transaction

from ..rollouts.rollout import Rollout

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triolet.config.membership import RedisMembersConfig

ROLLOUTS: Final = "rollouts"
SETTING: Final = "control.redis.url"
KEPT_OVER: Final = 256
"""Rollouts that are kept after their end: one for each of more models than serve at once."""

READ: Final = """
local found = {}
for _, model in ipairs(redis.call('SMEMBERS', ARGV[1])) do
    local row = redis.call('HMGET', ARGV[1] .. ':' .. model, 'number', 'renewed_at', 'body')
    if row[1] then found[#found + 1] = row end
end
return found
"""
# The answer to an earlier write of this control may be lost: its own writes never conflict.
WRITE: Final = """
local key = ARGV[1] .. ':' .. ARGV[2]
local row = redis.call('HMGET', key, 'number', 'owner')
local number = tonumber(row[1] or '0')
if number ~= tonumber(ARGV[3]) and row[2] ~= ARGV[4] then return 0 end
redis.call('HSET', key, 'owner', ARGV[4], 'renewed_at', ARGV[5])
if ARGV[6] then
    redis.call('SADD', ARGV[1], ARGV[2])
    redis.call('HSET', key, 'number', number + 1, 'body', ARGV[6])
end
return number + 1
"""
"""Writes a rollout; without a body, renews it."""
OWNER_BYTES: Final = 8


class RolloutStoreAway(TrioletError):
    """The store does not answer or cannot be written; the text says why."""


class RolloutStolen(TrioletError):
    """Another control has written this rollout."""

    def __init__(self, model: str) -> None:
        super().__init__(f"another control has changed the rollout of {model}")


class KeptRollout(NamedTuple):
    """A rollout in a store.

    Attributes:
      rollout: the rollout.
      number: number of its last write.
      renewed_at: Unix time of the last write or renewal.
    """

    rollout: Rollout
    number: int
    renewed_at: float


class RolloutStore(Protocol):
    """A store of rollouts. Every method raises RolloutStoreAway if it cannot be used."""

    async def read(self) -> list[KeptRollout]:
        """Return the latest rollout of each model."""

    async def write(self, rollout: Rollout, number: int, now: float) -> int:
        """Write a rollout, and return the number of this write.

        Args:
          rollout: the rollout.
          number: number of the last write for its model; 0 if there was none.
          now: Unix time.

        Raises:
          RolloutStolen: the kept number is another one.
        """

    async def renew(self, model: str, number: int, now: float) -> None:
        """Record that control is alive.

        Raises:
          RolloutStolen: the kept number is another one.
        """


class SqliteRollouts:
    """Rollouts in control's journal.

    Args:
      connection: connection to the journal.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    async def read(self) -> list[KeptRollout]:
        """See `RolloutStore.read`."""
        try:
            rows = self._connection.execute("SELECT number, renewed_at, body FROM rollouts")
            return _kept(rows)
        except sqlite3.Error as error:
            raise RolloutStoreAway(f"the journal cannot be read: {error}") from error

    async def write(self, rollout: Rollout, number: int, now: float) -> int:
        """See `RolloutStore.write`."""
        body = msgspec.json.encode(rollout).decode()
        row = (rollout.settings.model, number + 1, now, rollout.is_over, body, number)
        self._change(
            rollout.settings.model,
            "INSERT INTO rollouts SELECT ?1, ?2, ?3, ?4, ?5 WHERE ?6 = "
            "coalesce((SELECT number FROM rollouts WHERE model = ?1), 0) ON CONFLICT (model) DO "
            "UPDATE SET number = ?2, renewed_at = ?3, is_over = ?4, body = ?5",
            row,
        )
        return number + 1

    async def renew(self, model: str, number: int, now: float) -> None:
        """See `RolloutStore.renew`."""
        row = (now, model, number)
        self._change(
            model, "UPDATE rollouts SET renewed_at = ? WHERE model = ? AND number = ?", row
        )

    def _change(self, model: str, statement: str, row: tuple[object, ...]) -> None:
        try:
            with transaction(self._connection):
                is_changed = self._connection.execute(statement, row).rowcount == 1
                self._connection.execute(
                    "DELETE FROM rollouts WHERE is_over AND model NOT IN "
                    "(SELECT model FROM rollouts ORDER BY renewed_at DESC LIMIT ?)",
                    (KEPT_OVER,),
                )
        except sqlite3.Error as error:
            raise RolloutStoreAway(f"the journal cannot be written: {error}") from error
        if not is_changed:
            raise RolloutStolen(model)


class RedisRollouts:
    """Rollouts in a Redis, for controls on several hosts.

    Args:
      config: the Redis and the fleet.

    Raises:
      ConfigError: the file of the URL cannot be read.
    """

    def __init__(self, config: RedisMembersConfig) -> None:
        self._calls = RegistrationCalls(config, SETTING, ROLLOUTS)
        self._owner = secrets.token_hex(OWNER_BYTES)

    async def read(self) -> list[KeptRollout]:
        """See `RolloutStore.read`."""
        rows = await self._call(READ)
        return _kept((int(number), float(at), body) for number, at, body in rows)

    async def write(self, rollout: Rollout, number: int, now: float) -> int:
        """See `RolloutStore.write`."""
        body = msgspec.json.encode(rollout).decode()
        return await self._written(rollout.settings.model, number, now, body)

    async def renew(self, model: str, number: int, now: float) -> None:
        """See `RolloutStore.renew`."""
        await self._written(model, number, now)

    async def _written(self, model: str, number: int, now: float, *body: str) -> int:
        found: int = await self._call(WRITE, model, str(number), self._owner, now, *body)
        if not found:
            raise RolloutStolen(model)
        return found

    async def _call(self, script: str, *arguments: str | float) -> Any:  # noqa: ANN401 (Redis')
        try:
            return await self._calls.once(script, *arguments)
        except StoreGone as error:
            raise RolloutStoreAway(f"Redis does not answer: {said_by(error)}") from error


def _kept(rows: Iterable[tuple[int, float, str]]) -> list[KeptRollout]:
    """Decode rows.

    Raises:
      RolloutStoreAway: one is of another release.
    """
    try:
        return [
            KeptRollout(msgspec.json.decode(body, type=Rollout), number, renewed_at)
            for number, renewed_at, body in rows
        ]
    except msgspec.MsgspecError as error:
        raise RolloutStoreAway(
            f"a rollout cannot be read: {error}; run the release that wrote it until its end"
        ) from error
