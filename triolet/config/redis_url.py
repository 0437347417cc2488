"""URLs of Redis or Valkey: checks them, reads them from files, and hides passwords for logs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, urlsplit

from ..errors import ConfigError, SettingError

AT: Final = "@"
"""Prefix of the name of a file with the URL: options are visible to every user that can list
processes."""


SCHEMES: Final = ("redis", "rediss", "unix")


def require_redis_url(name: str, url: str, others: str = "") -> None:
    """Raise a SettingError unless a setting is a Redis URL, or `@` and a file's name.

    Args:
      name: of the setting.
      url: its value.
      others: other allowed values, for the message.
    """
    if not url.startswith(AT) and not _is_place(url):
        raise SettingError(
            f"{name} is {shown_url(url)!r}; allowed: {others}redis://HOST[:PORT][/DB], "
            "rediss://…, unix:///PATH, without a query, or @FILE with one of these"
        )


def resolved_url(given: str, setting: str) -> str:
    """Return the URL, read from a file if given as `@FILE`.

    Args:
      given: the value of the setting.
      setting: its name, for errors.

    Raises:
      ConfigError: the file cannot be read, or names another file.
    """
    if not given.startswith(AT):
        return given
    try:
        url = Path(given.removeprefix(AT)).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file that {setting} names cannot be read: {error}") from None
    if url.startswith(AT):
        raise ConfigError(f"the file that {setting} names must hold a URL, not another file's name")
    return url


def _is_place(url: str) -> bool:
    """Return whether a URL names a Redis and has no parts that would be ignored, such as a
    query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    place = parts.path if parts.scheme == "unix" else parts.hostname
    is_whole = not parts.query and not parts.fragment
    return parts.scheme in SCHEMES and bool(place) and is_whole and _is_numbered(parts)


def _is_numbered(parts: SplitResult) -> bool:
    """Return whether a URL's port and database, if given, are numbers."""
    try:
        port = parts.port
    except ValueError:
        return False
    database = parts.path[1:]
    is_database = not database or (database.isascii() and database.isdigit())
    return parts.scheme == "unix" or (port != 0 and is_database and len(database) < 10)


def shown_url(url: str) -> str:
    """Return a URL without its user and password, for logs."""
    scheme, is_url, rest = url.partition("://")
    if not is_url:
        return "(no URL)"
    place = re.split("[?#]", rest.rpartition("@")[2])[0]
    return f"{scheme.lower()}://{place}"


def has_password(url: str) -> bool:
    """Return whether a URL contains a password, even if it is otherwise invalid."""
    user, is_named, _ = url.partition("://")[2].rpartition("@")
    return bool(is_named) and ":" in user
