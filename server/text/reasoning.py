"""Reasoning as models write it before the answer: between two marker tokens, told apart in text.

The markers are tokens. A model may also write the same characters as ordinary tokens, for example
to quote them; so the text shows a marker token in a form that no ordinary token has (`marked`).
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from .tool_calls import Reasoning, overlap

if TYPE_CHECKING:
    from .tool_calls import Piece, PieceReader

_EDGE: Final = "\udc00"
"""Half of a surrogate pair: decoded text never has one."""


def marked(content: str) -> str:
    """Return how the text of a completion shows a marker token."""
    return f"{_EDGE}{content}{_EDGE}"


class ThinkForm(NamedTuple):
    """How a model writes its reasoning.

    Attributes:
      opening: the token before it.
      closing: the token behind it.
    """

    opening: str
    closing: str


THINK: Final = ThinkForm("<think>", "</think>")
"""Qwen3, QwQ, DeepSeek-R1 and its distills, and many others."""


class Thinking(NamedTuple):
    """How one completion is read.

    Attributes:
      form: how its model writes reasoning.
      is_open: the prompt ends within reasoning, so that no opening comes.
    """

    form: ThinkForm
    is_open: bool


class _State(Enum):
    BEFORE = "before"  # neither reasoning nor an answer has begun
    THINKING = "thinking"
    ANSWER = "answer"


class ThinkReader:
    """Reads one completion: its reasoning itself, its answer by another reader.

    Args:
      thinking: how reasoning is written.
      answer: reads what follows.
    """

    def __init__(self, thinking: Thinking, answer: PieceReader) -> None:
        form = thinking.form
        self._opening, self._closing = marked(form.opening), marked(form.closing)
        self._answer = answer
        self._state = _State.THINKING if thinking.is_open else _State.BEFORE
        self._held = ""
        self._has_reasoning = self._has_answer = False

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._answer.num_calls

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what it says."""
        self._held += text
        pieces: list[Piece] = []
        if self._state is _State.BEFORE:
            self._look_for_opening()
        if self._state is _State.THINKING:
            pieces += self._take_reasoning()
        if self._state is _State.ANSWER:
            pieces += self._take_answer()
        return pieces

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return what was held back, now that nothing follows."""
        held, self._held = self._held, ""
        if self._state is _State.THINKING:
            return self._reasoning(held.rstrip())
        pieces = self._answer.push(self._plain(held)) if held else []
        return pieces + self._answer.finish(is_cut=is_cut)

    def _look_for_opening(self) -> None:
        begin = self._held.lstrip()
        if begin.startswith(self._opening):
            self._held, self._state = begin, _State.THINKING
        elif begin and not self._opening.startswith(begin):
            # Without reasoning the answer is shown as it is, its first line breaks included.
            self._state, self._has_answer = _State.ANSWER, True

    def _take_reasoning(self) -> list[Piece]:
        if not self._has_reasoning:
            # Some models write an opening although the prompt has it.
            self._held = self._held.lstrip().removeprefix(self._opening).lstrip()
            if self._opening.startswith(self._held):
                return []
        before, closing, behind = self._held.partition(self._closing)
        if closing:
            self._held, self._state = behind, _State.ANSWER
            return self._reasoning(before.rstrip())
        shown = before[: len(before) - overlap(before, self._closing)].rstrip()
        self._held = before[len(shown) :]
        return self._reasoning(shown)

    def _take_answer(self) -> list[Piece]:
        if not self._has_answer:
            self._held = self._held.lstrip("\n")
            self._has_answer = bool(self._held)
        # What may be the first half of a marker waits for the other.
        longest = max(overlap(self._held, word) for word in (self._opening, self._closing))
        cut = len(self._held) - longest
        text, self._held = self._plain(self._held[:cut]), self._held[cut:]
        return self._answer.push(text) if text else []

    def _reasoning(self, text: str) -> list[Piece]:
        text = self._plain(text)
        self._has_reasoning |= bool(text)
        return [Reasoning(text)] if text else []

    def _plain(self, text: str) -> str:
        """Return a text with its marker tokens as people would read them."""
        return text.replace(_EDGE, "")
