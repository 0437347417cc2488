"""`RedisSource`: finds workers by polling the registrations that they write to Redis."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import structlog

from transport.registrations import LIST, MAX_BYTES, RegistrationCalls, read_registration
from triolet.config.members import MAX_MEMBERS
from triolet.errors import ConfigError
from triolet.ids import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from triolet.config.members import Member, Members
    from triolet.config.membership import MembershipConfig

    from .member_table import MemberTable

log = structlog.get_logger(__name__)


class RedisSource:
    """The workers registered in one Redis under one fleet's name. See `MemberSource`.

    Args:
      config: the Redis, the fleet, and the polling interval.
      table: decides who stays a member.
      models: names of this server's models.

    Raises:
      ConfigError: the file with the URL cannot be read.
    """

    def __init__(
        self, config: MembershipConfig, table: MemberTable, models: Collection[str]
    ) -> None:
        self._calls = RegistrationCalls(config.redis, "server.membership.redis.url")
        self.health = self._calls.health
        self._poll_s = config.redis_poll_s
        self._table = table
        self._models = models
        self._ignores = False

    async def run(self, use: Callable[[Members], None]) -> None:
        """Read the registrations at an interval, until cancelled."""
        await self._calls.repeat(
            self._poll_s, LIST, MAX_MEMBERS, MAX_BYTES, took=partial(self._take, use)
        )

    def _take(self, use: Callable[[Members], None], texts: Sequence[str]) -> str:
        """Apply the live registrations, newest first; log once that some cannot be used. Return why
        the whole answer is not used, or an empty text."""
        found: dict[str, Member] = {}
        wrong: list[str] = []
        for text in texts:
            try:
                member = read_registration(text, self._models)
            except ConfigError as error:
                wrong.append(str(error))
            else:
                if found.setdefault(member.address, member) != member:
                    wrong.append(f"{member.address} is registered twice; the newer one counts")
        if wrong and not self._ignores:
            log.warning("registrations_ignored", count=len(wrong), first=wrong[0])
        self._ignores = bool(wrong)
        return self._table.take(found.values(), (Role.PREFILL, Role.DECODE), use)
