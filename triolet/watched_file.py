"""Watch a small file that an operator or another process may replace, and read new versions."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final, NamedTuple

from .errors import ConfigError

ROOT: Final = 0
"""Files placed by an administrator or a container mount belong to root."""
OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class Stamp(NamedTuple):
    """Values that differ between two versions of a file. All 0 for a missing file."""

    inode: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0  # changes even if the other times are preserved
    size: int = 0


class WatchedFile:
    """One file.

    Args:
      path: path of the file.
      what: name of its content, for errors.
      max_bytes: size limit.
      is_guarded: refuse a file that a user other than this one or root may have written.

    Attributes:
      path: path of the file.
    """

    def __init__(self, path: str, what: str, max_bytes: int, *, is_guarded: bool = False) -> None:
        self.path = Path(path)
        self._is_guarded = is_guarded
        self._what = what
        self._max_bytes = max_bytes
        self._seen = Stamp()
        self._taken = Stamp()

    def read(self) -> bytes:
        """Return the content of the file.

        Raises:
          ConfigError: it cannot be read, is too long, or others may have written it.
        """
        try:
            with self.path.open("rb") as file:
                # Of the opened file; the name may point to another one by now.
                status = os.fstat(file.fileno())
                self._taken = self._seen = _stamp(status)
                if self._is_guarded:
                    self._require_own(status)
                content = file.read(self._max_bytes + 1)
        except OSError as error:
            raise ConfigError(f"the file of {self._what} cannot be read: {error}") from None
        if len(content) > self._max_bytes:
            raise ConfigError(
                f"{self.path} is longer than the {self._max_bytes} bytes of a file of {self._what}"
            )
        return content

    def _require_own(self, status: os.stat_result) -> None:
        what = f"{self.path}, a file of {self._what},"
        if status.st_uid not in (os.geteuid(), ROOT):
            raise ConfigError(
                f"{what} belongs to user {status.st_uid}, expected {os.geteuid()} or "
                f"root: `chown {os.geteuid()} {self.path}` after checking its content"
            )
        if status.st_mode & OTHERS_WRITE:
            raise ConfigError(
                f"{what} has mode {stat.S_IMODE(status.st_mode):04o}, so others may have "
                f"written it: `chmod go-w {self.path}` after checking its content"
            )

    def has_settled(self) -> bool:
        """Return whether the file differs from the version read and has not changed since the last
        check."""
        try:
            stamp = _stamp(self.path.stat())
        except OSError:
            stamp = Stamp()
        is_as_seen, self._seen = stamp == self._seen, stamp
        return is_as_seen and stamp != self._taken

    def note_tried(self) -> None:
        """Treat the present version as read although reading it failed, so that it is reported
        once."""
        self._taken = self._seen


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
