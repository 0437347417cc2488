"""Word wrapping for text that arrives in pieces, used by `triolet chat`.

A word is printed once its end is known, so that printed text never has to move.
"""

from __future__ import annotations

import re
from typing import Final

_PIECES: Final = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrap:
    """Wraps one text.

    Args:
      width: columns; the terminal breaks longer words.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._held = ""
        self._is_inside_word = False

    def feed(self, text: str) -> str:
        """Add text and return what can be printed now."""
        *whole, last = _PIECES.findall(self._held + text) or [""]
        # The last word may continue. White space and overlong words need not wait.
        is_too_long = len(last) > self._width or (not whole and self._is_inside_word)
        if last.isspace() or is_too_long:
            whole.append(last)
            last = ""
        self._held = last
        shown = "".join(self._placed(piece) for piece in whole)
        self._is_inside_word = is_too_long and not whole[-1].isspace()
        return shown

    def finish(self) -> str:
        """Return the text that was held back."""
        last, self._held = self._held, ""
        return self._placed(last)

    def _placed(self, piece: str) -> str:
        if piece.isspace():
            self._is_inside_word = False
            if piece == "\n":
                self._column = 0
                return piece
            # Drop white space beyond the end of a line.
            shown = piece[: max(0, self._width - self._column)]
            self._column += len(shown)
            return shown
        needs_break = (
            self._column > 0
            and self._column + len(piece) > self._width
            and not self._is_inside_word
        )
        if needs_break:
            self._column = 0
        self._column += len(piece)
        if self._column > self._width:
            self._column %= self._width
        return f"\n{piece}" if needs_break else piece
