"""What was said last of each attempt, so that a lost ENDED can be said again in the same words.

Knows frames and time; whether an attempt may begin is the lease table's to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transport.frames import Ended
    from triolet.config import LinkConfig
    from triolet.ids import AttemptKey


class LastWords:
    """How attempts ended, for a while.

    Args:
      link: how long, and how many at most.
    """

    def __init__(self, link: LinkConfig) -> None:
        self._keep_s = link.tombstone_s
        self._max_words = link.max_tombstones
        # In the order in which they were said, which is the order in which they are forgotten.
        self._said: dict[AttemptKey, tuple[float, Ended]] = {}

    def say(self, ended: Ended, now: float) -> None:
        """Remember an end; the first one of an attempt stands."""
        if ended.key in self._said:
            return
        if len(self._said) >= self._max_words:
            del self._said[next(iter(self._said))]
        self._said[ended.key] = (now, ended)

    def find(self, key: AttemptKey) -> Ended | None:
        """Return how an attempt ended, or None if it is not known to have ended."""
        found = self._said.get(key)
        return None if found is None else found[1]

    def sweep(self, now: float) -> None:
        """Forget what is older than any frame can be under way."""
        while self._said:
            key = next(iter(self._said))
            if now - self._said[key][0] <= self._keep_s:
                return
            del self._said[key]
