"""Selects the running fleet for a command, by `--port` or as the only one.

A command that changes a fleet never guesses: without `--port` it takes the only fleet with this
home and runtime directory; otherwise it asks on a terminal, and fails elsewhere.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from triolet.errors import ConfigError

from .running_fleets import FleetUnclear, find_fleet

if TYPE_CHECKING:
    from .running_fleets import RunningFleet


def fleet_to_change(port: int | None, *, with_control: bool = False) -> RunningFleet:
    """Return the fleet for a command that changes it.

    Args:
      port: port of the fleet; None if not given.
      with_control: whether a `triolet control` without a fleet counts too.

    Raises:
      CommandFailed: no fleet runs, or none on this port.
      ConfigError: the choice is not clear.
    """
    try:
        return find_fleet(port, with_control=with_control)
    except FleetUnclear as unclear:
        if port is not None or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        return _asked(unclear)


def fleet_to_show(port: int | None) -> RunningFleet:
    """Return the fleet for a command that shows it. Prints which one if there are others.

    Args:
      port: port of the fleet; None if not given.

    Raises:
      CommandFailed: no fleet runs, or none on this port.
      ConfigError: several fleets have this home and runtime directory.
    """
    try:
        return find_fleet(port)
    except FleetUnclear as unclear:
        likely = [fleet for fleet in unclear.fleets if fleet.is_own] or unclear.fleets
        if port is not None or len(likely) > 1:
            raise
        typer.echo(f"showing the fleet on {likely[0]}; use --port for another one", err=True)
        return likely[0]


def _asked(unclear: FleetUnclear) -> RunningFleet:
    typer.echo(f"{unclear}\nPort of the fleet: ", nl=False, err=True)
    said = sys.stdin.readline()
    if not said.endswith("\n"):
        raise typer.Abort
    meant = [fleet for fleet in unclear.fleets if str(fleet.note.port) == said.strip()]
    if len(meant) != 1:
        raise ConfigError(f"no single fleet here has port {said.strip()!r}; nothing was done")
    return meant[0]
