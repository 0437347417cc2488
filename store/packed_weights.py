"""The folder of packed weights: its location, and the removal of unused files.

`engine/snapshots` writes and maps them; `triolet model gc` removes them. A process locks each file
for as long as it maps it.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from triolet.home import cache_home, expanded

PACKED: Final = ".packed"
UNFINISHED: Final = ".unfinished"
OWN_STEM: Final = re.compile(r"[0-9a-f]{32}")
"""Suffix of each file that is written there. An operator may name a folder with other files."""


class CollectedSnapshots(NamedTuple):
    """Result of a collection.

    Attributes:
      num_files: removed files.
      num_bytes: their size.
      num_in_use: files that processes have mapped; they stay.
    """

    num_files: int = 0
    num_bytes: int = 0
    num_in_use: int = 0


def packed_folder(named: str | None) -> Path:
    """Return the folder in `worker.engine.snapshots.folder`, or this user's default.

    Raises:
      ConfigError: none is named, and this user has no home directory.
    """
    return cache_home() / "triolet" / "packed" if named is None else expanded(Path(named))


def hold(fd: int) -> None:
    """Protect a file from removal. A mapping of `fd` keeps the lock too, until it ends.

    A file that is just being removed gets no lock, but can be mapped all the same.
    """
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_locked_by_us(fd: int, path: Path) -> bool:
    """Lock a file; return whether it is ours and still has its name."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


def remove_unless_held(path: Path) -> bool:
    """Remove a file unless a process writes or maps it; return whether it is gone."""
    try:
        # Opened for writing, because NFS locks only such files exclusively.
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        is_free = is_locked_by_us(fd, path)
        if is_free:
            path.unlink()
    finally:
        os.close(fd)
    return is_free


def collect_packed(folder: Path) -> CollectedSnapshots:
    """Remove all packed weights that no process uses.

    Raises:
      OSError: the folder cannot be read, or a file in it not removed.
    """
    num_files = num_bytes = num_in_use = 0
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix not in (PACKED, UNFINISHED) or not OWN_STEM.fullmatch(path.stem):
            continue
        with suppress(FileNotFoundError):  # another process has removed or renamed it
            size = path.lstat().st_size
            if remove_unless_held(path):
                num_files, num_bytes = num_files + 1, num_bytes + size
            else:
                num_in_use += 1
    return CollectedSnapshots(num_files, num_bytes, num_in_use)
