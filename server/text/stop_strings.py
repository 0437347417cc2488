"""Finds stop strings in text that arrives in pieces.

Knows text only. Where the text ends depends on the characters, never on how they were cut into
pieces: the stop string that is complete first wins, and of those that end together the longest.
"""

from __future__ import annotations

from typing import NamedTuple


class Scan(NamedTuple):
    """What one piece of text led to.

    Attributes:
      text: may be shown now.
      matched: the stop string that ended the text, or None.
    """

    text: str
    matched: str | None


class StopMatcher:
    """Holds back only what may be the beginning of a stop string.

    Args:
      stop: the strings, none empty.
      include_stop: the text ends behind the stop string instead of before it.
    """

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool = False) -> None:
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self._stop = stop
        self._include_stop = include_stop
        self._held = ""

    def push(self, piece: str) -> Scan:
        """Take the next piece. After a match nothing more may be pushed."""
        if not self._stop:
            return Scan(piece, None)
        text = self._held + piece
        matches = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if matches:
            end, begin, matched = min(matches)
            self._held = ""
            return Scan(text[: end if self._include_stop else begin], matched)
        num_held = max(_overlap(text, s) for s in self._stop)
        cut = len(text) - num_held
        self._held = text[cut:]
        return Scan(text[:cut], None)

    def flush(self) -> str:
        """Return what was held back: no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` begin `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
