"""Breaks text between words while it is still coming. Pure.

A word is held back until it is known where it ends, so that it never has to be taken back.
"""

from __future__ import annotations

import re
from typing import Final

_PIECES: Final = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrap:
    """One text on a screen.

    Args:
      width: columns; a single word that is wider is left to the terminal.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._held = ""

    def feed(self, text: str) -> str:
        """Take what came and return what can be shown now."""
        *whole, last = _PIECES.findall(self._held + text) or [""]
        # More of the last word may follow; white space and overlong words need not wait.
        if last.isspace() or len(last) > self._width:
            whole.append(last)
            last = ""
        self._held = last
        return "".join(self._placed(piece) for piece in whole)

    def finish(self) -> str:
        """Return what was held back."""
        last, self._held = self._held, ""
        return self._placed(last)

    def _placed(self, piece: str) -> str:
        if piece == "\n":
            self._column = 0
            return piece
        if self._column + len(piece) <= self._width:
            self._column += len(piece)
            return piece
        if piece.isspace():
            self._column = self._width
            return ""
        is_at_start = self._column == 0
        self._column = len(piece) % self._width
        return piece if is_at_start else f"\n{piece}"
