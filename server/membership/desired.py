"""Polls Redis for the desired numbers of workers, which `triolet scale` writes and servers export
to autoscalers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.registrations import (
    DESIRED,
    LIST_DESIRED,
    MAX_DESIRED,
    RegistrationCalls,
    read_desired,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.config import ServerConfig
    from triolet.ids import Place


class DesiredWorkers:
    """The desired numbers of one fleet. While Redis is away, the last ones stay in effect.

    Args:
      config: the server's settings.

    Raises:
      ConfigError: the file with the URL cannot be read.

    Attributes:
      numbers: desired number by place.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.numbers: dict[Place, int] = {}
        part = "scale" if config.scale.redis.url else "membership"
        self._calls = RegistrationCalls(config.desired_redis, f"server.{part}.redis.url", DESIRED)
        self._poll_s = config.scale.poll_s

    async def run(self) -> None:
        """Read the numbers at an interval."""
        await self._calls.repeat(self._poll_s, LIST_DESIRED, MAX_DESIRED, took=self._take)

    def _take(self, answer: Sequence[str]) -> str:
        self.numbers = read_desired(answer)
        return ""
