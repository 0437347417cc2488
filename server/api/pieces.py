"""What a completion says, piece by piece: reasoning, text, and calls of tools. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..text.reasoning import ThinkReader
from ..text.tool_calls import Text

if TYPE_CHECKING:
    from ..text.reasoning import Thinking
    from ..text.tool_calls import Piece, PieceReader, ToolForm


class PlainText:
    """Reads a completion that is only text."""

    num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """Return the text."""
        return [Text(text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return nothing: nothing was held back."""
        return []


def reader_of(form: ToolForm | None, thinking: Thinking | None = None) -> PieceReader:
    """Return what reads a completion.

    Args:
      form: how calls are written; None if there are none.
      thinking: how reasoning is written; None if there is none.
    """
    answer: PieceReader = PlainText() if form is None else form.reader()
    return answer if thinking is None else ThinkReader(thinking, answer)
