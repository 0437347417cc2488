"""A completion read in whole parts: its text, its reasoning, and each call with all arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .scanning import parsed_arguments
from .tool_calls import Arguments, CallBegins, Piece, PieceReader, Reasoning, Text

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(slots=True)
class WholeCall:
    """A call of a tool.

    Attributes:
      index: of the call.
      name: of the tool.
      arguments: as the model wrote them; half of them if the completion was cut.
    """

    index: int
    name: str
    arguments: str = ""

    @property
    def given(self) -> dict[str, Any] | None:
        """The arguments as an object; None if they are none."""
        parsed = parsed_arguments(self.arguments)
        return parsed if isinstance(parsed, dict) else None


Part = Text | Reasoning | WholeCall


class Joined(NamedTuple):
    """What some parts come to.

    Attributes:
      text: all of it.
      reasoning: all of it.
      calls: in order.
    """

    text: str
    reasoning: str
    calls: list[WholeCall]


def joined(parts: Iterable[Part]) -> Joined:
    """Return what some parts come to."""
    parts = list(parts)
    return Joined(
        "".join(part.text for part in parts if isinstance(part, Text)),
        "".join(part.text for part in parts if isinstance(part, Reasoning)),
        [part for part in parts if isinstance(part, WholeCall)],
    )


class WholeCalls:
    """Reads one completion: text and reasoning as they come, calls when they are complete.

    Args:
      reader: reads the pieces of the completion.
    """

    def __init__(self, reader: PieceReader) -> None:
        self._reader = reader
        self._call: WholeCall | None = None

    def push(self, text: str) -> list[Part]:
        """Take more text; return what it says."""
        return self._take(self._reader.push(text))

    def finish(self, *, is_cut: bool) -> list[Part]:
        """Return what was held back, now that nothing follows. See PieceReader."""
        return [*self._take(self._reader.finish(is_cut=is_cut)), *self._complete()]

    def read(self, text: str, *, is_cut: bool) -> list[Part]:
        """Return what a whole completion says, neighbours of one kind as one."""
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
                    assert self._call is not None, "a call begins with its name"
                    self._call.arguments += piece.text
                case CallBegins():
                    parts += self._complete()
                    self._call = WholeCall(piece.index, piece.name)
                case _:
                    parts += [*self._complete(), piece]
        return parts

    def _complete(self) -> list[WholeCall]:
        """Return the call whose arguments have ended, if one was open."""
        call, self._call = self._call, None
        return [] if call is None else [call]
