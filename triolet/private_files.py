"""Files and folders that only this user can enter or read.

New ones are made so. Older ones that are wider are tightened, with a log line, or refused where
this user may not do that.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final

import structlog

from .errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

log = structlog.get_logger(__name__)

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
_OTHERS: Final = 0o077
_SQLITE_FILES: Final = ("", "-wal", "-shm", "-journal")
"""Suffixes of what SQLite keeps of one database. New ones get the mode of the first."""


def keep_private() -> None:
    """Let whatever this process and its children make from now on, sockets too, be private."""
    os.umask(_OTHERS)


def make_private_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing; older ones stay as they are.

    Raises:
      OSError: it cannot be made.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=FOLDER_MODE, exist_ok=True)


def make_private_database(path: Path) -> None:
    """Make an empty file for SQLite, or tighten a database that is there.

    Raises:
      OSError: it cannot be made.
      ConfigError: others may read it, and this user may not change that.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    except FileExistsError:
        # By name: to open and close it would end the locks that this process may have on it.
        for suffix in _SQLITE_FILES:
            tighten(path.with_name(path.name + suffix))


def take_private_folder(folder: Path, own_names: str | tuple[str, ...]) -> None:
    """Make a folder that is for one database or log alone, or tighten it.

    Args:
      folder: which.
      own_names: how the names of its own files begin. A wide folder that holds anything else is not
        changed: it may be one that others need to enter, such as /tmp.

    Raises:
      OSError: it cannot be made or looked into.
      ConfigError: it is wide and stays so.
    """
    make_private_folder(folder)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if not mode & _OTHERS:
        return
    if any(not path.name.startswith(own_names) for path in folder.iterdir()):
        raise ConfigError(
            f"{folder} has mode {mode:04o} and holds other files too: `chmod 700 {folder}`, or "
            f"give a folder of its own, such as {folder / 'triolet'}"
        )
    tighten(folder)


def tighten(path: Path) -> None:
    """Take the rights of others from a file or a folder, if it is there and they have any.

    Raises:
      OSError: it cannot be looked at.
      ConfigError: this user may not do that.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return
    if not mode & _OTHERS:
        return
    try:
        path.chmod(mode & ~_OTHERS)
    except PermissionError as error:
        raise ConfigError(
            f"{path} has mode {mode:04o} and is another user's, so that others may read what "
            "tenants have stored: let its owner take their rights away, or give another place"
        ) from error
    log.warning("rights_of_others_removed", path=str(path), mode=f"{mode:04o}")
