"""Drops tool calls that a completion repeats, and ends the completion at a repeat.

A model that must call a tool but was not trained to may write the same call until its token limit:
after each call the grammar allows an end, but the model prefers another call.
"""

from __future__ import annotations

from dataclasses import dataclass

from .tool_calls import Arguments, CallBegins, CallsRead, Piece, PieceReader


@dataclass(frozen=True, slots=True)
class OnceEach(CallsRead):
    """A tool call format that drops calls which repeat an earlier one."""

    form: CallsRead

    def reader(self) -> UnrepeatedCalls:
        """See CallsRead."""
        return UnrepeatedCalls(self.form.reader())

    def watch(self) -> RepeatWatch:
        """Return a watch that ends a completion at its first repeated call."""
        return RepeatWatch(self.reader())


class RepeatWatch:
    """Ends a completion after the first call that repeats an earlier one.

    Args:
      reader: parses the completion.
    """

    def __init__(self, reader: UnrepeatedCalls) -> None:
        self._reader = reader

    def push(self, text: str) -> bool:
        """Add text; return whether the completion must end after it."""
        self._reader.push(text)
        return self._reader.has_repeated


class UnrepeatedCalls:
    """Parses one completion, dropping calls that are identical to an earlier one.

    A call is returned from the first character on in which it differs from all earlier ones.

    Args:
      reader: parses all calls.

    Attributes:
      num_calls: number of calls returned.
      has_repeated: whether a call was dropped.
    """

    def __init__(self, reader: PieceReader) -> None:
        self.num_calls = 0
        self.has_repeated = False
        self._reader = reader
        self._earlier: list[tuple[str, str]] = []
        self._call: tuple[str, str] | None = None
        self._is_shown = False

    def push(self, text: str) -> list[Piece]:
        """Process more text; return the parsed pieces."""
        return self._unrepeated(self._reader.push(text))

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the pieces held back at the end."""
        pieces = self._unrepeated(self._reader.finish(is_cut=is_cut))
        if self._call is not None and not self._is_shown and not is_cut and not self.has_repeated:
            pieces += self._show(*self._call)
        return pieces

    def _unrepeated(self, pieces: list[Piece]) -> list[Piece]:
        shown: list[Piece] = []
        for piece in pieces:
            match piece:
                case CallBegins():
                    self._end_call()
                    self._call = (piece.name, "")
                    self._is_shown = False
                    if not self._may_repeat(piece.name, ""):
                        shown += self._show(piece.name, "")
                case Arguments():
                    shown += self._take(piece.text)
                case _:
                    shown.append(piece)
        return shown

    def _take(self, text: str) -> list[Piece]:
        """Process more of a call's arguments."""
        assert self._call is not None
        name, before = self._call
        self._call = (name, before + text)
        if self._is_shown:
            return [Arguments(self.num_calls - 1, text)]
        if self._call in self._earlier:
            # A complete value: no continuation can make it differ.
            self.has_repeated = True
            return []
        return [] if self._may_repeat(*self._call) else self._show(*self._call)

    def _may_repeat(self, name: str, arguments: str) -> bool:
        return any(name == one and told.startswith(arguments) for one, told in self._earlier)

    def _show(self, name: str, arguments: str) -> list[Piece]:
        self._is_shown = True
        self.num_calls += 1
        index = self.num_calls - 1
        return [CallBegins(index, name), *([Arguments(index, arguments)] if arguments else [])]

    def _end_call(self) -> None:
        if self._call is not None and self._is_shown:
            self._earlier.append(self._call)
        self._call = None
