"""Creates a private directory (mode 0700) for the sockets of a local fleet, and removes it at the
end.

Each directory contains a lock that its process holds. The next fleet removes directories with a
free lock, which were left by killed processes.
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
"""The path of a Unix socket may have 107 bytes; the longest name of a socket here has 26."""


def parent_directory() -> Path:
    """Return the parent of such directories: the user's runtime directory or the temporary one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK | os.X_OK) and len(os.fsencode(runtime)) <= 60:
        return Path(runtime)
    return Path(tempfile.gettempdir())


@contextmanager
def private_directory(parent: Path) -> Iterator[Path]:
    """Create the directory, and remove it with its content when the context ends.

    Args:
      parent: parent directory; see `parent_directory`.

    Raises:
      ConfigError: it cannot be created, or its path is too long for a socket.
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
            # Rename the lock once it is held, so that no other fleet sees it free and removes this.
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
