"""Parses a completion into complete parts: text, reasoning, and calls with all of their
arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .scanning import parsed_arguments
from .tool_calls import Arguments, CallBegins, Piece, PieceReader, Reasoning, Text

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(slots=True)
class WholeCall:
    """A complete tool call.

    Attributes:
      index: the call's index.
      name: the tool's name.
      arguments: as the model wrote them; incomplete if the completion was truncated.
    """

    index: int
    name: str
    arguments: str = ""

    @property
    def given(self) -> dict[str, Any] | None:
        """The arguments as an object; None if they are not one."""
        parsed = parsed_arguments(self.arguments)
        return parsed if isinstance(parsed, dict) else None


Part = Text | Reasoning | WholeCall


class Joined(NamedTuple):
    """Parts joined by kind.

    Attributes:
      text: all text.
      reasoning: all reasoning.
      calls: the calls in order.
    """

    text: str
    reasoning: str
    calls: list[WholeCall]


def joined(parts: Iterable[Part]) -> Joined:
    """Join parts by kind."""
    parts = list(parts)
    return Joined(
        "".join(part.text for part in parts if isinstance(part, Text)),
        "".join(part.text for part in parts if isinstance(part, Reasoning)),
        [part for part in parts if isinstance(part, WholeCall)],
    )


class WholeCalls:
    """Parses one completion: returns text and reasoning as they arrive, and calls when complete.

    Args:
      reader: parses the pieces of the completion.
    """

    def __init__(self, reader: PieceReader) -> None:
        self._reader = reader
        self._call: WholeCall | None = None

    def push(self, text: str) -> list[Part]:
        """Process more text; return the parsed parts."""
        return self._take(self._reader.push(text))

    def finish(self, *, is_cut: bool) -> list[Part]:
        """Return the parts held back at the end. See PieceReader."""
        return [*self._take(self._reader.finish(is_cut=is_cut)), *self._complete()]

    def read(self, text: str, *, is_cut: bool) -> list[Part]:
        """Parse a whole completion, joining adjacent parts of one kind."""
        parts: list[Part] = []
        for part in [*self.push(text), *self.finish(is_cut=is_cut)]:
            match (parts[-1] if parts else None, part):
                case (Text(before), Text(more)):
                    parts[-1] = Text(before + more)
                case (Reasoning(before), Reasoning(more)):
                    parts[-1] = Reasoning(before + more)
                case _:
                    parts.append(part)
        return parts

    def _take(self, pieces: Iterable[Piece]) -> list[Part]:
        parts: list[Part] = []
        for piece in pieces:
            match piece:
                case Arguments():
                    assert self._call is not None, "a call starts with its name"
                    self._call.arguments += piece.text
                case CallBegins():
                    parts += self._complete()
                    self._call = WholeCall(piece.index, piece.name)
                case _:
                    parts += [*self._complete(), piece]
        return parts

    def _complete(self) -> list[WholeCall]:
        """Return the open call, now with complete arguments, or None."""
        call, self._call = self._call, None
        return [] if call is None else [call]
