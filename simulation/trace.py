"""Record the history of a run as a hash, equal for all runs of a seed, and optionally as text."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import trio
import xxhash

from transport.codec import decode
from triolet.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_LINES: Final = 200_000
"""Maximum number of lines; older ones are dropped to bound memory."""
MAX_FRAME_BYTES: Final = 1 << 24


class Trace:
    """All messages, events and faults of a run, in order.

    Args:
      keeps_lines: whether to keep the lines in addition to the hash; ten times slower.
    """

    def __init__(self, *, keeps_lines: bool = False) -> None:
        self._hash = xxhash.xxh3_128()
        self._is_hashing = True
        self._lines: deque[str] | None = deque(maxlen=MAX_LINES) if keeps_lines else None

    @property
    def lines(self) -> Sequence[str]:
        """The lines; empty unless they are kept."""
        return () if self._lines is None else tuple(self._lines)

    def hexdigest(self) -> str:
        """Return the hash of everything so far."""
        return self._hash.hexdigest()

    def finish(self) -> None:
        """Finish the hash, because later events depend on more than the seed."""
        self._is_hashing = False

    def note(self, what: str) -> None:
        """Add an event."""
        now = trio.current_time()
        if self._is_hashing:
            self._hash.update(f"{now!r} {what}".encode())
        if self._lines is not None:
            self._lines.append(f"{now:10.4f}  {what}")

    def sent(self, route: str, parts: Sequence[bytes | memoryview], fate: str) -> None:
        """Add a message and its fate."""
        now = trio.current_time()
        if self._is_hashing:
            self._hash.update(b"".join((f"{now!r} {route} {fate}".encode(), *parts)))
        if self._lines is not None:
            self._lines.append(f"{now:10.4f}  {route} {fate}{_shown(parts)}")


def _shown(parts: Sequence[bytes | memoryview]) -> str:
    try:
        return str(decode(parts[0], MAX_FRAME_BYTES))
    except RemoteProtocolError as error:
        return f"({error})"
