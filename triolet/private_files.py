"""Create files and folders that only this user can access, and tighten existing ones.

Permissions of existing files that are too wide are tightened and logged, or the file is refused if
this user may not change them.
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
"""Suffixes of SQLite's files of one database. New ones get the mode of the first."""


def keep_private() -> None:
    """Make everything private that this process and its children create from now on, sockets
    too."""
    os.umask(_OTHERS)


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents; existing ones stay as they are.

    Raises:
      OSError: it cannot be created.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=FOLDER_MODE, exist_ok=True)


def make_private_database(path: Path) -> None:
    """Create an empty file for SQLite, or tighten an existing database.

    Raises:
      OSError: it cannot be created.
      ConfigError: others may read it, and this user may not change that.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    except FileExistsError:
        # By name: opening and closing it would release this process's locks on it.
        for suffix in _SQLITE_FILES:
            tighten(path.with_name(path.name + suffix))


def take_private_folder(folder: Path, own_names: str | tuple[str, ...]) -> None:
    """Create or tighten a folder for one database or log.

    Args:
      folder: the folder.
      own_names: prefixes of the names of its own files. A wide folder with other files is not
        changed: other users may need it, as with /tmp.

    Raises:
      OSError: it cannot be created or listed.
      ConfigError: its permissions are too wide and stay so.
    """
    make_private_folder(folder)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if not mode & _OTHERS:
        return
    if any(not path.name.startswith(own_names) for path in folder.iterdir()):
        raise ConfigError(
            f"{folder} has mode {mode:04o} and holds other files too: `chmod 700 {folder}`, or "
            f"use a separate folder, such as {folder / 'triolet'}"
        )
    tighten(folder)


def tighten(path: Path) -> None:
    """Remove other users' rights from a file or folder, if it exists and they have any.

    Raises:
      OSError: it cannot be inspected.
      ConfigError: this user may not change it.
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
            f"{path} has mode {mode:04o} and is another user's, so others may read what "
            "tenants have stored: ask its owner to remove their rights, or use another place"
        ) from error
    log.warning("rights_of_others_removed", path=str(path), mode=f"{mode:04o}")
