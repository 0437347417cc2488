"""Fleets of this user that run on this machine, from the notes of their supervisors.

Each fleet has a private directory with a note and a lock; a directory without a holder of the lock
is ignored. A fleet of another home or run time directory than this process has is found as well,
and is never the one that a command without `--port` means.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from triolet.errors import ConfigError

from .exit_codes import CommandFailed
from .private_directory import LOCK, PREFIX, parent_directory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NOTE: Final = "fleet.json"
SUPERVISOR_SOCKET: Final = "supervisor"


class Note(msgspec.Struct, frozen=True):
    """What a supervisor writes down. Fields beyond the port have defaults, because the supervisor
    may be of the release before: `triolet restart` of the new one has to find it.

    Attributes:
      port: that clients connect to.
      url: base address for clients of this machine.
      workers: where each one is reached, by its name; without stand-ins.
      models: that requests may name.
      pid: of the supervisor.
      home: of the user who started it, as the supervisor's environment says.
    """

    port: int
    url: str = ""
    workers: dict[str, str] = {}
    models: tuple[str, ...] = ()
    pid: int | None = None
    home: str = ""


class RunningFleet(msgspec.Struct, frozen=True):
    """A fleet that runs.

    Attributes:
      directory: with its sockets.
      note: what its supervisor says of it.
      is_own: it has the home and the run time directory of this process.
    """

    directory: Path
    note: Note
    is_own: bool = True

    @property
    def supervisor_socket(self) -> Path:
        """Where the supervisor listens."""
        return self.directory / SUPERVISOR_SOCKET

    def __str__(self) -> str:
        """Return what tells it from others: port, models and directory."""
        models = f" ({', '.join(self.note.models)})" if self.note.models else ""
        return f"port {self.note.port}{models} in {self.directory}"


class FleetUnclear(ConfigError):
    """Several fleets run, or one that this process may not mean.

    Attributes:
      fleets: which.
    """

    def __init__(self, fleets: Sequence[RunningFleet]) -> None:
        ports = [str(fleet.note.port) for fleet in fleets]
        listed = "; ".join(map(str, fleets))
        if len(fleets) > 1:
            message = (
                f"{len(fleets)} fleets run here, on ports {', '.join(ports)}; add --port with the "
                f"one that is meant: {listed}"
            )
        else:
            message = (
                f"the only fleet here has another home or run time directory: {listed}; if it is "
                f"meant, add --port {ports[0]}"
            )
        super().__init__(message)
        self.fleets = fleets


def write_note(directory: Path, note: Note) -> None:
    """Let commands find a fleet; one that reads meanwhile finds the note before."""
    new = directory / f"{NOTE}.new"
    new.write_bytes(msgspec.json.encode(note))
    os.replace(new, directory / NOTE)


def find_fleet(port: int | None) -> RunningFleet:
    """Return the fleet that is meant: the one on this port, or the only one that runs here, if it
    has the home and the run time directory of this process.

    Raises:
      CommandFailed: none runs, or not on this port.
      FleetUnclear: several do, or one of another place, and no port was given.
    """
    fleets = [fleet for fleet in running_fleets() if port in (None, fleet.note.port)]
    if not fleets:
        where = "" if port is None else f" on port {port}"
        raise CommandFailed(f"no `triolet serve` of this user runs here{where}; start one")
    if len(fleets) > 1 or (port is None and not fleets[0].is_own):
        raise FleetUnclear(fleets)
    return fleets[0]


def home() -> str:
    """Return the home directory of this process, which its fleets note."""
    return os.path.expanduser("~")


def running_fleets() -> list[RunningFleet]:
    """Return every fleet of this user on this machine, by port."""
    places = {parent_directory(), Path(tempfile.gettempdir())}
    found = [fleet for place in places for fleet in _fleets_in(place)]
    return sorted(found, key=lambda fleet: fleet.note.port)


def _fleets_in(parent: Path) -> Iterator[RunningFleet]:
    for path in parent.glob(f"{PREFIX}*/{NOTE}"):
        try:
            if path.parent.stat().st_uid != os.geteuid():
                continue  # anybody may make a directory of such a name in a public place
            note = msgspec.json.decode(path.read_bytes(), type=Note)
            with (path.parent / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Its owner holds the lock. One of the release before notes no home.
            is_own = parent == parent_directory() and note.home in ("", home())
            yield RunningFleet(path.parent, note, is_own)
        except (OSError, msgspec.MsgspecError):
            continue  # another user's, or it ended at this moment
