"""A fresh directory that only this user can enter, for the sockets of one local fleet.

Removed at the end. Each directory holds a lock that ends with its process; the next fleet removes
directories without a holder, whose process was killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from triolet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX: Final = "triolet-"
LOCK: Final = "lock"
MAX_PATH_BYTES: Final = 80
"""An ipc path may have 107 bytes; the longest name of a socket here has 26."""


def parent_directory() -> Path:
    """Return where such directories are made: this user's run time directory, or the temporary
    one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK | os.X_OK) and len(os.fsencode(runtime)) <= 60:
        return Path(runtime)
    return Path(tempfile.gettempdir())


@contextmanager
def private_directory(parent: Path) -> Iterator[Path]:
    """Make the directory (mode 0700) and remove it, with everything in it, at the end.

    Args:
      parent: where; see `parent_directory`.

    Raises:
      ConfigError: it cannot be made, or its path is too long for a socket.
    """
    try:
        _remove_abandoned(parent)
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise ConfigError(
            f"cannot make a directory for sockets in {parent}: {error}; set TMPDIR to a directory "
            "that you can write to"
        ) from error
    try:
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise ConfigError(
                f"{path} is too long for sockets; set TMPDIR to a shorter one, such as /tmp"
            )
        with (path / f"{LOCK}.new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Only now can it be found, so nobody takes it for abandoned.
            (path / f"{LOCK}.new").rename(path / LOCK)
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*/{LOCK}"):
        try:
            with path.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:
            continue  # in use, or another user's
