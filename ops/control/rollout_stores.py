"""Where control keeps rollouts: its journal (SQLite), or the Redis of a fleet on several hosts.

Both keep the latest rollout of each model with a number that grows with each write. A write is
refused if another control has written since, so that of two controls only one goes on.
"""

from __future__ import annotations

import secrets
import sqlite3
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec
import structlog
from msgspec.structs import replace

from transport.redis_calls import StoreGone
from transport.registrations import RegistrationCalls
from triolet.errors import TrioletError, said_by
from triolet.sqlite import transaction

from ..rollouts.rollout import Rollout

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triolet.config.membership import RedisMembersConfig

log = structlog.get_logger(__name__)

ROLLOUTS: Final = "rollouts"
SETTING: Final = "control.redis.url"

READ: Final = """
local found = {}
for _, model in ipairs(redis.call('SMEMBERS', ARGV[1])) do
    local key = ARGV[1] .. ':' .. model
    local row = redis.call('HMGET', key, 'number', 'renewed_at', 'is_over', 'body')
    if row[1] then found[#found + 1] = {model, unpack(row)} end
end
return found
"""
# The answer to an earlier write of this control may be lost: its own writes never conflict. A Redis
# that lost its latest data has a lower number, or none: of several controls the latest goes on.
WRITE: Final = """
local key = ARGV[1] .. ':' .. ARGV[2]
local row = redis.call('HMGET', key, 'number', 'owner')
local number, known = tonumber(row[1] or '0'), tonumber(ARGV[3])
if number > known and row[2] ~= ARGV[4] then return 0 end
if number < known and not ARGV[6] then return -1 end
redis.call('HSET', key, 'owner', ARGV[4], 'renewed_at', ARGV[5])
if ARGV[6] then
    number = math.max(number, known) + 1
    redis.call('SADD', ARGV[1], ARGV[2])
    redis.call('HSET', key, 'number', number, 'is_over', ARGV[6], 'body', ARGV[7])
end
return number
"""
"""Writes a rollout; without a body, renews it. Returns its number: 0 if another control has written
it, -1 if there is no such write to renew."""
OWNER_BYTES: Final = 8
KEEP_RELEASE: Final = "run the release that wrote it until its end, then this one"


class RolloutStoreAway(TrioletError):
    """The store does not answer or cannot be written; the text says why."""


class RolloutStolen(TrioletError):
    """Another control has written this rollout."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"another control has changed the rollout of {model}; give orders to that control"
        )


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


def body_of(rollout: Rollout) -> str:
    """Return a rollout as JSON, without `warm_at`: it would be four fifths of five megabytes, which
    control would write every ten seconds. After a restart, each user has one more first request."""
    evidence = replace(rollout.evidence, warm_at={})
    return msgspec.json.encode(replace(rollout, evidence=evidence)).decode()


class ReadRollouts:
    """Decodes the rollouts of a store. Those of another release may not be readable: one that is
    over is left out, and a later one may replace it; one that is not blocks its name only."""

    def __init__(self) -> None:
        self._unread: dict[str, tuple[int, str]] = {}  # number, and why its name is blocked

    def decode(self, rows: Iterable[tuple[str, int, float, bool, str]]) -> list[KeptRollout]:
        """Return the rollouts of rows: model, number, time of renewal, whether it is over, body."""
        found = []
        for model, number, renewed_at, is_over, body in rows:
            try:
                rollout = msgspec.json.decode(body, type=Rollout)
                found.append(KeptRollout(rollout, number, renewed_at))
            except msgspec.MsgspecError as error:
                do = "nothing need be done" if is_over else KEEP_RELEASE
                why = f"the last rollout of {model} cannot be read: {error}; {do}"
                self._unread[model] = number, "" if is_over else why
                log.warning("rollout_not_read", reason=why)
        return found

    def number(self, model: str, number: int) -> int:
        """Return the number of the last write for a model.

        Args:
          model: public name.
          number: the number that control knows; 0 for none.

        Raises:
          RolloutStoreAway: its last rollout is not over, and cannot be read.
        """
        last, why = self._unread.get(model, (0, ""))
        if why:
            raise RolloutStoreAway(why)
        return number or last


class SqliteRollouts:
    """Rollouts in control's journal.

    Args:
      connection: connection to the journal.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._found = ReadRollouts()

    async def read(self) -> list[KeptRollout]:
        """Return the latest rollout of each model.

        Raises:
          RolloutStoreAway: the store cannot be used.
        """
        try:
            return self._found.decode(
                self._connection.execute(
                    "SELECT model, number, renewed_at, is_over, body FROM rollouts"
                )
            )
        except sqlite3.Error as error:
            raise RolloutStoreAway(f"the journal cannot be read: {error}") from error

    async def write(self, rollout: Rollout, number: int, now: float) -> int:
        """Write a rollout, and return the number of this write.

        Args:
          rollout: the rollout.
          number: number of the last write for its model; 0 if there was none.
          now: Unix time.

        Raises:
          RolloutStoreAway: the store cannot be used, or cannot read the model's last rollout.
          RolloutStolen: the kept number is another one.
        """
        model = rollout.settings.model
        number = self._found.number(model, number)
        self._change(
            model,
            "INSERT INTO rollouts SELECT ?1, ?2, ?3, ?4, ?5 WHERE ?6 = "
            "coalesce((SELECT number FROM rollouts WHERE model = ?1), 0) ON CONFLICT (model) DO "
            "UPDATE SET number = ?2, renewed_at = ?3, is_over = ?4, body = ?5",
            (model, number + 1, now, rollout.is_over, body_of(rollout), number),
        )
        return number + 1

    async def renew(self, rollout: Rollout, number: int, now: float) -> None:
        """Record that control is alive. See `write`."""
        model = rollout.settings.model
        self._change(
            model,
            "UPDATE rollouts SET renewed_at = ? WHERE model = ? AND number = ?",
            (now, model, number),
        )

    def _change(self, model: str, statement: str, row: tuple[object, ...]) -> None:
        try:
            with transaction(self._connection):
                is_changed = self._connection.execute(statement, row).rowcount == 1
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
        self._found = ReadRollouts()

    async def read(self) -> list[KeptRollout]:
        """See `SqliteRollouts.read`."""
        rows = await self._call(READ)
        return self._found.decode(
            (model, int(number), float(at), is_over == "1", body)
            for model, number, at, is_over, body in rows
        )

    async def write(self, rollout: Rollout, number: int, now: float) -> int:
        """See `SqliteRollouts.write`. A Redis without the last write, which lost it, gets this
        one."""
        is_over = str(int(rollout.is_over))
        return await self._written(rollout, number, now, is_over, body_of(rollout))

    async def renew(self, rollout: Rollout, number: int, now: float) -> None:
        """See `SqliteRollouts.renew`. A Redis that lost the rollout gets it again."""
        if await self._written(rollout, number, now) < 0:
            await self.write(rollout, number, now)

    async def _written(self, rollout: Rollout, number: int, now: float, *body: str) -> int:
        model = rollout.settings.model
        number = self._found.number(model, number)
        found: int = await self._call(WRITE, model, str(number), self._owner, now, *body)
        if not found:
            raise RolloutStolen(model)
        return found

    async def _call(self, script: str, *arguments: str | float) -> Any:  # noqa: ANN401 (Redis')
        try:
            return await self._calls.once(script, *arguments)
        except StoreGone as error:
            raise RolloutStoreAway(f"Redis does not answer: {said_by(error)}") from error


RolloutStore: TypeAlias = SqliteRollouts | RedisRollouts
