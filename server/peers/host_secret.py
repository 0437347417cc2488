"""The secret shared by servers on several hosts. It proves that a request comes from one of
them."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import TYPE_CHECKING, Final

from triolet.errors import ConfigError
from triolet.private_files import tighten

if TYPE_CHECKING:
    from collections.abc import Iterable

SECRET_HEADER: Final = "x-triolet-host-secret"
_LEAST_CHARACTERS: Final = 32


class HostSecret:
    """The secret.

    Args:
      text: its characters; they are ASCII.

    Attributes:
      text: see Args.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def matches(self, value: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(value.encode(), self.text.encode())

    def is_in(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return whether headers (with lower-case names) contain the secret."""
        wanted = SECRET_HEADER.encode()
        return any(
            name == wanted and self.matches(value.decode("latin-1")) for name, value in headers
        )


def read_host_secret(path: str) -> HostSecret:
    """Read the secret from a file, and remove other users' rights from the file.

    Raises:
      ConfigError: the file cannot be used.
    """
    setting = f"server.hosts.secret_file is {path!r}"
    try:
        tighten(Path(path))
        text = Path(path).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}, which cannot be read: {error}") from None
    if len(text) < _LEAST_CHARACTERS or not (text.isprintable() and text.isascii()):
        raise ConfigError(
            f"{setting}, which does not hold one line of at least {_LEAST_CHARACTERS} ASCII "
            "characters: make it with `openssl rand -hex 32`"
        )
    return HostSecret(text)
