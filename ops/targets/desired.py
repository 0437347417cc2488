"""`DesiredStore`: how many processes of each role a fleet should have, in Redis. `triolet scale`
writes it, servers export it as `triolet_desired_workers`, and autoscalers act on that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.redis_calls import StoreGone
from transport.registrations import (
    DESIRED,
    FORGET_DESIRED,
    LIST,
    LIST_DESIRED,
    MAX_BYTES,
    MAX_DESIRED,
    MEMBERS,
    SET_DESIRED,
    RegistrationCalls,
    read_desired,
    registered_places,
    written_place,
)
from triolet.config.members import MAX_MEMBERS
from triolet.errors import ConfigError

from ..exit_codes import CommandFailed

if TYPE_CHECKING:
    from collections import Counter
    from typing import Any

    from triolet.config.membership import RedisMembersConfig
    from triolet.ids import Place


class DesiredStore:
    """The desired numbers of one fleet.

    Args:
      config: URL of Redis, and the fleet's name.

    Raises:
      ConfigError: no Redis is configured.
    """

    def __init__(self, config: RedisMembersConfig) -> None:
        if not config.url:
            raise ConfigError(
                "server.membership.redis.url is missing: that Redis holds the desired numbers of "
                "workers; give --config triolet.toml with it, or server.scale.redis.url"
            )
        self._config = config

    async def set(self, place: Place, count: int) -> None:
        """Set the desired number of a place."""
        await self._call(SET_DESIRED, DESIRED, written_place(place), count)

    async def numbers(self) -> dict[Place, int]:
        """Return the desired numbers."""
        return read_desired(await self._call(LIST_DESIRED, DESIRED, MAX_DESIRED))

    async def forget(self) -> None:
        """Remove all desired numbers."""
        await self._call(FORGET_DESIRED, DESIRED)

    async def registered(self) -> Counter[Place]:
        """Return how many workers are registered at each place."""
        return registered_places(await self._call(LIST, MEMBERS, MAX_MEMBERS, MAX_BYTES))

    async def _call(self, script: str, kind: str, *arguments: str | float) -> Any:  # noqa: ANN401
        calls = RegistrationCalls(self._config, "server.membership.redis.url", kind)
        try:
            return await calls.once(script, *arguments)
        except StoreGone as gone:
            raise CommandFailed(f"the fleet's Redis does not answer: {gone}") from gone
