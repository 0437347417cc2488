"""Which of the fleets that run here a command means.

A command that changes a fleet never chooses one by itself: without `--port` it takes the only fleet
of this home and run time directory, asks on a terminal, and refuses elsewhere.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from triolet.errors import ConfigError

from .running_fleets import FleetUnclear, find_fleet

if TYPE_CHECKING:
    from .running_fleets import RunningFleet


def fleet_to_change(port: int | None) -> RunningFleet:
    """Return the fleet that a command changes.

    Args:
      port: of the fleet; None if the command line does not say it.

    Raises:
      CommandFailed: none runs, or not on this port.
      ConfigError: it is not clear which one is meant.
    """
    try:
        return find_fleet(port)
    except FleetUnclear as unclear:
        if port is not None or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        return _asked(unclear)


def fleet_to_show(port: int | None) -> RunningFleet:
    """Return the fleet that a command shows, and say which one where another could be meant.

    Args:
      port: of the fleet; None if the command line does not say it.

    Raises:
      CommandFailed: none runs, or not on this port.
      ConfigError: several fleets of this home and run time directory could be meant.
    """
    try:
        return find_fleet(port)
    except FleetUnclear as unclear:
        likely = [fleet for fleet in unclear.fleets if fleet.is_own] or unclear.fleets
        if port is not None or len(likely) > 1:
            raise
        typer.echo(f"showing the fleet on {likely[0]}; --port shows another one", err=True)
        return likely[0]


def _asked(unclear: FleetUnclear) -> RunningFleet:
    typer.echo(f"{unclear}\nPort of the fleet that is meant: ", nl=False, err=True)
    said = sys.stdin.readline()
    if not said.endswith("\n"):
        raise typer.Abort
    meant = [fleet for fleet in unclear.fleets if str(fleet.note.port) == said.strip()]
    if len(meant) != 1:
        raise ConfigError(f"{said.strip()!r} is the port of no single fleet here; nothing was done")
    return meant[0]
