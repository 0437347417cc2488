"""The user's folders for cache, data and state (XDG base directories)."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ConfigError


def cache_home() -> Path:
    """Return the folder for files that can be made again.

    Raises:
      ConfigError: this user has no home directory, and no variable names the folder.
    """
    return _home("XDG_CACHE_HOME", ".cache")


def data_home() -> Path:
    """Return the folder for the user's data.

    Raises:
      ConfigError: as in `cache_home`.
    """
    return _home("XDG_DATA_HOME", ".local/share")


def state_home() -> Path:
    """Return the folder for state that outlives a process.

    Raises:
      ConfigError: as in `cache_home`.
    """
    return _home("XDG_STATE_HOME", ".local/state")


def _home(variable: str, default: str) -> Path:
    named = os.environ.get(variable, "")
    # The specification says to ignore relative paths.
    if os.path.isabs(named):
        return Path(named)
    try:
        return Path.home() / default
    except RuntimeError:
        raise ConfigError(
            f"this user (uid {os.getuid()}) has no home directory: set {variable} or HOME to an "
            "absolute path that it can write to"
        ) from None


def expanded(path: Path) -> Path:
    """Expand a leading ~ or ~USER.

    Raises:
      ConfigError: there is no such user or home directory.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{path} begins with {path.parts[0]}, which has no home directory here; write the full "
            "path"
        ) from None
