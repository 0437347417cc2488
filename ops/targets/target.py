"""`Target`: the interface through which `triolet scale` and `triolet fleet` change and observe a
fleet, wherever it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import trio

from ..exit_codes import CommandFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from triolet.ids import Place


class Observed(NamedTuple):
    """Observed state of one place.

    Attributes:
      desired: desired number of processes; None if it was never set.
      alive: number of processes that serve; None if unknown.
      hindrances: why the other processes do not serve, one line each.
      urls: servers' addresses for clients.
    """

    desired: int | None
    alive: int | None
    hindrances: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()


class Target(Protocol):
    """A place where a fleet runs. Every call has a deadline."""

    def check(self, place: Place) -> None:
        """Refuse a place whose number cannot be set here.

        Raises:
          ConfigError: the message names the place and what is allowed.
        """
        ...

    async def scale(self, place: Place, count: int, tell: Callable[[str], object]) -> None:
        """Start or stop processes until a checked place has this number. Idempotent.

        Args:
          place: the processes.
          count: their number.
          tell: called with a description of each step.

        Raises:
          ConfigError: the target has no such model, or cannot run this number; nothing was changed.
          CommandFailed: the number was not reached; the message says what is missing.
        """
        ...

    async def observe(self) -> dict[Place, Observed]:
        """Return the desired and observed state of each place.

        Raises:
          CommandFailed: the target does not answer.
        """
        ...


async def together(jobs: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Run jobs concurrently, and wait for all of them.

    Raises:
      CommandFailed: one or more failed; the message is that of the first.
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
