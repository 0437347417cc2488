"""Worker registrations in Redis, and the desired numbers of workers beside them: their format, keys
and scripts. Used by workers, servers and `triolet scale`.

A fleet's registrations are one sorted set, `{triolet}:FLEET:members`. An element is a registration
as JSON; its score is the time at which it expires, by Redis's clock. The hash
`{triolet}:FLEET:desired` has the desired number of processes of each place.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from triolet.config import resolved_url
from triolet.config.members import MAX_MEMBERS, Member
from triolet.errors import ConfigError
from triolet.ids import Place, Role
from triolet.store_health import StoreHealth
from triolet.units import KIB

from .address import require_dialable
from .redis_calls import RedisCalls, StoreGone, with_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from typing import Any

    from triolet.config.membership import RedisMembersConfig

MEMBERS, DESIRED = "members", "desired"
"""Last parts of the keys."""
COUNTED: Final = frozenset({Role.SERVER, Role.PREFILL, Role.DECODE})
"""Roles with a desired number."""
LABEL_OR_NONE: Final = re.compile(r"[A-Za-z0-9._-]{0,63}")
"""Names of models and zones, which become labels of metrics."""
MAX_DESIRED: Final = 1024
"""Most places with a desired number: each becomes a series in the servers' metrics."""
MAX_BYTES: Final = 2 * KIB
"""Most bytes of one registration: an address, a model's name and five labels."""

_NOW: Final = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1e6
local function text(value) return string.format('%.6f', value) end
"""
REGISTER: Final = (
    _NOW
    + """
local key, registration, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
redis.call('ZREMRANGEBYSCORE', key, '-inf', text(now))
redis.call('ZADD', key, text(now + ttl), registration)
redis.call('EXPIRE', key, 86400)
"""
)
"""Add or renew a registration, and remove expired ones. Arguments: key, registration, lifetime
[s]."""
LIST: Final = (
    _NOW
    + """
local key, most, max_bytes = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local found = redis.call('ZREVRANGEBYSCORE', key, '+inf', text(now), 'LIMIT', 0, most)
for i, one in ipairs(found) do
  if #one > max_bytes or one:find('[^ -~]') then found[i] = '' end
end
return found
"""
)
"""Return the live registrations, newest first; '' in place of one that is too long or not ASCII.
Arguments: key, most registrations, most bytes of one."""
SET_DESIRED: Final = "redis.call('HSET', ARGV[1], ARGV[2], ARGV[3])"
"""Set a desired number. Arguments: key, place, number."""
FORGET_DESIRED: Final = "redis.call('DEL', ARGV[1])"
"""Remove all desired numbers. Argument: key."""
LIST_DESIRED: Final = """
if redis.call('HLEN', ARGV[1]) > tonumber(ARGV[2]) then return {} end
return redis.call('HGETALL', ARGV[1])
"""
"""Return places and desired numbers alternately, or nothing if there are too many. Arguments: key,
most numbers."""


class Registration(Member, frozen=True, forbid_unknown_fields=False):
    """A worker's registration. Newer releases may add fields.

    Attributes:
      labels: where it runs and what it costs, for operators; servers read WELCOME.
    """

    labels: dict[str, str] = msgspec.field(default_factory=dict)


class RegistrationCalls:
    """Calls scripts on the registrations or desired numbers of one fleet, once or repeatedly.

    Args:
      config: the Redis and the fleet.
      setting: name of the setting with the URL, for errors.
      kind: MEMBERS or DESIRED.

    Raises:
      ConfigError: the file of the URL cannot be read.

    Attributes:
      health: whether Redis answers.
    """

    def __init__(self, config: RedisMembersConfig, setting: str, kind: str = MEMBERS) -> None:
        self.health = StoreHealth(f"redis, {kind} of fleet {config.fleet}", trio.current_time())
        self._use_redis = partial(
            with_calls,
            url=resolved_url(config.url, setting),
            first=(f"{{triolet}}:{config.fleet}:{kind}",),
            connect_timeout_s=config.timeout_s,
            call_timeout_s=config.timeout_s,
        )

    async def once(self, script: str, *arguments: str | float) -> Any:  # noqa: ANN401 (Redis')
        """Call a script once and return its answer.

        Raises:
          StoreGone: the script may or may not have run.
        """
        answers = []

        async def call(calls: RedisCalls) -> None:
            answers.append(await calls.call(script, *arguments))

        await self._use_redis(call, scripts=(script,))
        return answers[0]

    async def repeat(
        self,
        interval_s: float,
        script: str,
        *arguments: str | float,
        took: Callable[[Any], str] = lambda _: "",
    ) -> None:
        """Call a script at an interval until cancelled; connect again while Redis is away.

        Args:
          interval_s: between two calls.
          script: the script, called with the key and the arguments.
          arguments: its other arguments.
          took: called with each answer; returns why it cannot be used, or an empty text.
        """

        async def go_on(calls: RedisCalls) -> None:
            while True:
                trouble = took(await calls.call(script, *arguments))
                self.health.note(trouble, trio.current_time())
                await trio.sleep(interval_s)

        while True:
            try:
                await self._use_redis(go_on, scripts=(script,))
            except StoreGone as gone:
                self.health.note(str(gone), trio.current_time())
            await trio.sleep(interval_s)


def written_registration(member: Member, labels: Mapping[str, str]) -> str:
    """Return a registration as ASCII text.

    Raises:
      ConfigError: servers could not use it.
    """
    text = json.dumps(msgspec.to_builtins(member) | {"labels": dict(labels)})
    read_registration(text, [member.model])
    return text


def read_registration(text: str, models: Collection[str]) -> Member:
    """Parse a registration and return its member.

    Args:
      text: the registration.
      models: known models; "" for the first one.

    Raises:
      ConfigError: it is invalid, or servers cannot use it.
    """
    try:
        found = msgspec.json.decode(text, type=Registration)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{text[:100]!r} is not a registration: {error}") from None
    require_dialable(found.address)
    if found.role not in (Role.PREFILL, Role.DECODE):
        raise ConfigError(
            f"the role of {found.address} is {found.role.value}; allowed: prefill, decode"
        )
    if found.model not in models:
        raise ConfigError(
            f"the model of {found.address} is {found.model!r}, which this server does not serve"
        )
    return Member(found.role, found.address, found.model)


def registered_places(texts: Iterable[str]) -> Counter[Place]:
    """Return the number of these registrations by place."""
    found: Counter[Place] = Counter()
    for text in texts:
        with suppress(msgspec.DecodeError, RecursionError):
            one = msgspec.json.decode(text, type=Registration)
            found[Place(one.model, one.role, one.labels.get("zone", ""))] += 1
    return found


def written_place(place: Place) -> str:
    """Return a place's field name in the hash of desired numbers."""
    return json.dumps(place)


def read_desired(answer: Sequence[str]) -> dict[Place, int]:
    """Parse an answer of LIST_DESIRED. Entries that are not a place and a number are left out."""
    found = {}
    for field, count in zip(answer[::2], answer[1::2], strict=True):
        with suppress(msgspec.DecodeError, ValueError):
            place = msgspec.json.decode(field, type=Place)
            if place.role in COUNTED and all(
                map(LABEL_OR_NONE.fullmatch, (place.model, place.zone))
            ):
                found[place] = min(max(0, int(count)), MAX_MEMBERS)
    return found
