"""Where this user's own files are (XDG base directories), and what to do where there is no home."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ConfigError


def cache_home() -> Path:
    """Return where the user's programs keep what can be made again.

    Raises:
      ConfigError: this user has no home directory, and no variable says where.
    """
    return _home("XDG_CACHE_HOME", ".cache")


def data_home() -> Path:
    """Return where the user's programs keep their data.

    Raises:
      ConfigError: as of `cache_home`.
    """
    return _home("XDG_DATA_HOME", ".local/share")


def state_home() -> Path:
    """Return where the user's programs keep what shall outlive them.

    Raises:
      ConfigError: as of `cache_home`.
    """
    return _home("XDG_STATE_HOME", ".local/state")


def _home(variable: str, default: str) -> Path:
    named = os.environ.get(variable, "")
    # The specification has relative paths ignored.
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
    """Return a path with a leading ~ or ~USER replaced.

    Raises:
      ConfigError: there is no such user, or no home directory.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{path} begins with {path.parts[0]}, which has no home directory here; write the path "
            "out"
        ) from None
