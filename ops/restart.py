"""`triolet restart`: ask the supervisor of a local fleet to restart its processes while it serves.

The supervisor does it; this shows how far it is.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING

import trio
import typer

from triolet.errors import ConfigError
from triolet.ids import Role

from .exit_codes import CommandFailed
from .rolling import ORDER
from .running_fleets import find_fleet
from .supervisor_socket import Finished, Refused, RestartRequest, StepBegan, ask

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def run_restart(roles: Sequence[str], port: int | None) -> None:
    """Restart every process of some roles and show each step.

    Raises:
      ConfigError: there is no such role, or several fleets run and no port says which is meant.
      CommandFailed: none runs, or the restart was not done to its end.
    """
    for role in roles:
        if role not in ORDER:
            raise ConfigError(f"--role is {role!r}; allowed: {', '.join(sorted(ORDER))}")
    fleet = find_fleet(port)
    request = RestartRequest(tuple(Role(role) for role in roles))
    trio.run(_show, fleet.supervisor_socket, request)


async def _show(path: Path, request: RestartRequest) -> None:
    began = time.monotonic()
    async with aclosing(ask(path, request)) as answers:
        async for answer in answers:
            took_s = time.monotonic() - began
            match answer:
                case StepBegan(text):
                    typer.echo(f"{took_s:6.1f} s  {text}")
                case Finished():
                    typer.echo(f"{took_s:6.1f} s  done: every process is a new one")
                case Refused(message):
                    raise CommandFailed(message)
