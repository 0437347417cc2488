"""What a completion says, piece by piece: text, and calls of tools where there may be any. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..text.tool_calls import Text, ToolCallParser

if TYPE_CHECKING:
    from ..text.tool_calls import Piece, ToolForm


class PieceReader(Protocol):
    """Reads one completion."""

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        ...

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what it says."""
        ...

    def finish(self) -> list[Piece]:
        """Return what was held back, now that nothing follows."""
        ...


class PlainText:
    """Reads a completion that is only text."""

    num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """Return the text."""
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        """Return nothing: nothing was held back."""
        return []


def reader_of(form: ToolForm | None) -> PieceReader:
    """Return what reads a completion.

    Args:
      form: how calls are written; None if there are none.
    """
    return PlainText() if form is None else ToolCallParser(form)
