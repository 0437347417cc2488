"""Finds the running fleets of this user on this machine, through the notes of their supervisors.

Each fleet has a private directory with a note and a lock; directories with a free lock are ignored.
Fleets with another home or runtime directory are found too, but commands need `--port` for them.
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
    """Note of a supervisor. Fields after the port have defaults, because the supervisor may be of
    an older release, and `triolet restart` must find its fleet.

    Attributes:
      port: port for clients.
      url: base address for clients on this machine.
      workers: control address of each worker by name, without spares.
      models: public names of the models.
      pid: process id of the supervisor.
      home: home directory in the supervisor's environment.
      is_control: whether it is a `triolet control` without a fleet, for model orders only.
    """

    port: int
    url: str = ""
    workers: dict[str, str] = {}
    models: tuple[str, ...] = ()
    pid: int | None = None
    home: str = ""
    is_control: bool = False


class RunningFleet(msgspec.Struct, frozen=True):
    """A running fleet.

    Attributes:
      directory: private directory with its sockets.
      note: note of its supervisor.
      is_own: whether it has the home and runtime directory of this process.
    """

    directory: Path
    note: Note
    is_own: bool = True

    @property
    def supervisor_socket(self) -> Path:
        """Path of the supervisor's socket."""
        return self.directory / SUPERVISOR_SOCKET

    def __str__(self) -> str:
        """Return port, models and directory."""
        models = f" ({', '.join(self.note.models)})" if self.note.models else ""
        return f"port {self.note.port}{models} in {self.directory}"


class FleetUnclear(ConfigError):
    """Several fleets run, or only one with another home or runtime directory.

    Attributes:
      fleets: the running fleets.
    """

    def __init__(self, fleets: Sequence[RunningFleet]) -> None:
        ports = [str(fleet.note.port) for fleet in fleets]
        listed = "; ".join(map(str, fleets))
        if len(fleets) > 1:
            message = (
                f"{len(fleets)} fleets run here, on ports {', '.join(ports)}; select one with "
                f"--port: {listed}"
            )
        else:
            message = (
                f"the only fleet here has another home or runtime directory: {listed}; to select "
                f"it, add --port {ports[0]}"
            )
        super().__init__(message)
        self.fleets = fleets


def write_note(directory: Path, note: Note) -> None:
    """Write a fleet's note atomically, so that commands find it."""
    new = directory / f"{NOTE}.new"
    new.write_bytes(msgspec.json.encode(note))
    os.replace(new, directory / NOTE)


def find_fleet(port: int | None, *, with_control: bool = False) -> RunningFleet:
    """Return the fleet on a port; without a port, the only running fleet if it has the home and
    runtime directory of this process.

    Args:
      port: port of the fleet; None if not given.
      with_control: whether a `triolet control` without a fleet counts too.

    Raises:
      CommandFailed: no fleet runs, or none on this port.
      FleetUnclear: the choice is not clear.
    """
    fleets = [
        fleet
        for fleet in running_fleets()
        if port in (None, fleet.note.port) and (with_control or not fleet.note.is_control)
    ]
    if not fleets:
        where = "" if port is None else f" on port {port}"
        raise CommandFailed(f"no `triolet serve` of this user runs here{where}; start one")
    if len(fleets) > 1 or (port is None and not fleets[0].is_own):
        raise FleetUnclear(fleets)
    return fleets[0]


def home() -> str:
    """Return the home directory of this process."""
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
                continue  # any user can create a directory of such a name in a shared directory
            note = msgspec.json.decode(path.read_bytes(), type=Note)
            with (path.parent / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # The supervisor holds the lock. Notes of older releases have no home.
            is_own = parent == parent_directory() and note.home in ("", home())
            yield RunningFleet(path.parent, note, is_own)
        except (OSError, msgspec.MsgspecError):
            continue  # another user's, or the fleet just ended
