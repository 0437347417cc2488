"""How long a write waits for a client that takes nothing, and when it is tried again.

Knows bytes and seconds that somebody else measured; knows no socket and no clock.
"""

from __future__ import annotations

from typing import Final

ENOUGH_BYTES: Final = 64 * 1024
"""What a reader must take within the limit to count as alive."""
FIRST_WAIT_S: Final = 0.05
LAST_WAIT_S: Final = 1.0
"""Waits double from the first to the last. Writing is tried after each, because the kernel takes
bytes long before it says that there is room (a third of its buffer). Some it takes a fifth of a
second after a client's window has shut, as if to probe it: found at once they belong to the
beginning of a stall, found a second later they would put off its end by as much. Of a wait that
took longer than it should, because nothing ran here meanwhile, no more counts than it should have
taken."""


class Patience:
    """With one client, for one write.

    Args:
      limit_s: without enough progress, until it is over.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = self._left_s = limit_s
        self._wait_s = FIRST_WAIT_S
        self._num_bytes = 0

    @property
    def is_over(self) -> bool:
        """Whether the client has had its time."""
        return self._left_s <= 0

    @property
    def wait_s(self) -> float:
        """How long to wait before the next try."""
        return min(self._wait_s, self._left_s)

    def took(self, num_bytes: int) -> None:
        """Note that the client took something."""
        self._wait_s = FIRST_WAIT_S
        self._num_bytes += num_bytes
        if self._num_bytes >= ENOUGH_BYTES:
            self._left_s, self._num_bytes = self._limit_s, 0

    def waited(self, seconds: float) -> None:
        """Note a wait that brought nothing, or perhaps room."""
        self._left_s -= min(seconds, self._wait_s)
        self._wait_s = min(2 * self._wait_s, LAST_WAIT_S)
