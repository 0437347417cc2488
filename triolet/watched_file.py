"""A small file that an operator or another process replaces while this one runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from .errors import ConfigError


class Stamp(NamedTuple):
    """Figures that differ between two versions of a file. All 0 for a missing file."""

    inode: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0  # changes also when the other times are copied along
    size: int = 0


class WatchedFile:
    """One file.

    Args:
      path: of it.
      what: it holds, for errors.
      max_bytes: of its content.

    Attributes:
      path: as given.
    """

    def __init__(self, path: str, what: str, max_bytes: int) -> None:
        self.path = Path(path)
        self._what = what
        self._max_bytes = max_bytes
        self._seen = Stamp()
        self._taken = Stamp()

    def read(self) -> bytes:
        """Return its content.

        Raises:
          ConfigError: it cannot be read, or is too long.
        """
        try:
            with self.path.open("rb") as file:
                # Of what is read, not of what may have come to this name meanwhile.
                self._taken = self._seen = _stamp(os.fstat(file.fileno()))
                content = file.read(self._max_bytes + 1)
        except OSError as error:
            raise ConfigError(f"the file of {self._what} cannot be read: {error}") from None
        if len(content) > self._max_bytes:
            raise ConfigError(
                f"{self.path} is longer than the {self._max_bytes} bytes of a file of {self._what}"
            )
        return content

    def has_settled(self) -> bool:
        """Return whether the file differs from the one read, and not from the last look."""
        try:
            stamp = _stamp(self.path.stat())
        except OSError:
            stamp = Stamp()
        is_as_seen, self._seen = stamp == self._seen, stamp
        return is_as_seen and stamp != self._taken

    def note_tried(self) -> None:
        """Take the present version as read, although it could not be: it is told of once."""
        self._taken = self._seen


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
