"""Fleets of this user that run on this machine, from the notes of their supervisors.

Each fleet has a private directory with a note and a lock; a directory without a holder of the lock
is ignored.
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
    from collections.abc import Iterator

NOTE: Final = "fleet.json"
SUPERVISOR_SOCKET: Final = "supervisor"


class Note(msgspec.Struct, frozen=True):
    """What a supervisor writes down. Fields beyond the port have defaults, because the supervisor
    may be of the release before: `triolet restart` of the new one has to find it.

    Attributes:
      port: that clients connect to.
      url: base address for clients of this machine.
      workers: where each one is reached, by its name; without stand-ins.
    """

    port: int
    url: str = ""
    workers: dict[str, str] = {}


class RunningFleet(msgspec.Struct, frozen=True):
    """A fleet that runs.

    Attributes:
      directory: with its sockets.
      note: what its supervisor says of it.
    """

    directory: Path
    note: Note

    @property
    def supervisor_socket(self) -> Path:
        """Where the supervisor listens."""
        return self.directory / SUPERVISOR_SOCKET


def write_note(directory: Path, note: Note) -> None:
    """Let commands find a fleet; one that reads meanwhile finds the note before."""
    new = directory / f"{NOTE}.new"
    new.write_bytes(msgspec.json.encode(note))
    os.replace(new, directory / NOTE)


def find_fleet(port: int | None) -> RunningFleet:
    """Return the fleet that is meant: the one on this port, or the only one.

    Raises:
      CommandFailed: none runs, or not on this port.
      ConfigError: several do, and no port was given.
    """
    fleets = [fleet for fleet in running_fleets() if port in (None, fleet.note.port)]
    if not fleets:
        where = "" if port is None else f" on port {port}"
        raise CommandFailed(f"no `triolet serve` of this user runs here{where}; start one")
    if len(fleets) > 1:
        ports = ", ".join(str(fleet.note.port) for fleet in fleets)
        raise ConfigError(f"{len(fleets)} fleets run here, on ports {ports}; add --port")
    return fleets[0]


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
            yield RunningFleet(path.parent, note)  # its owner holds the lock
        except (OSError, msgspec.MsgspecError):
            continue  # another user's, or it ended at this moment
