"""Where the processes of a fleet run: the interface of a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import trio

from ..exit_codes import CommandFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from triolet.ids import Place


class Observed(NamedTuple):
    """What a target sees of one place.

    Attributes:
      desired: desired number of processes; None if it was never set.
      alive: number of processes that serve; None if unknown.
      hindrances: why others do not, one line each.
      urls: addresses for clients, of servers.
    """

    desired: int | None
    alive: int | None
    hindrances: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()


class Target(Protocol):
    """Where the processes of a fleet run. Every call ends by a deadline."""

    def check(self, place: Place) -> None:
        """Refuse a place whose number cannot be set here.

        Raises:
          ConfigError: the message names the place and what is allowed.
        """
        ...

    async def scale(self, place: Place, count: int, tell: Callable[[str], object]) -> None:
        """Set the number of processes of a checked place, and bring it about. Idempotent.

        Args:
          place: the processes.
          count: their number.
          tell: called with a description of each step.

        Raises:
          ConfigError: the model or the number does not exist here; nothing was changed.
          CommandFailed: the number was not reached; the message says what lacks.
        """
        ...

    async def observe(self) -> dict[Place, Observed]:
        """Return what is desired and what there is.

        Raises:
          CommandFailed: the target does not answer.
        """
        ...


async def together(jobs: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Run jobs at once, and wait for all of them.

    Raises:
      CommandFailed: some failed; it has the reason of the first.
    """
    failures: list[str] = []

    async def run(job: Callable[[], Awaitable[None]]) -> None:
        try:
            await job()
        except CommandFailed as failed:
            failures.append(str(failed))

    async with trio.open_nursery() as nursery:
        for job in jobs:
            nursery.start_soon(run, job)
    if failures:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise CommandFailed(f"{failures[0]}{more}")
