"""Calls of tools as models write them: found in a text that arrives piece by piece.

Knows the forms that models were trained on and how a chat template tells which is its model's;
knows no API. What looks like a call and turns out to be none is text again.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


class ToolForm(NamedTuple):
    """How a model writes a call.

    Attributes:
      opening: what comes before the call's JSON; empty if a completion that is a call begins with
        its brace.
      closing: what comes behind it.
      arguments: the key of the arguments, beside `name`.
      between: what stands between two calls.
    """

    opening: str
    closing: str
    arguments: str
    between: str


HERMES: Final = ToolForm("<tool_call>", "</tool_call>", "arguments", "\n")
"""Hermes, Qwen and many others: JSON between tags, anywhere in the text."""
LLAMA: Final = ToolForm("", "", "parameters", "; ")
"""Llama 3: the whole completion is JSON."""


def form_of(templates: Iterable[str]) -> ToolForm:
    """Return the form that the model of these chat templates knows; Hermes's if they say nothing,
    which every model can be made to write."""
    texts = list(templates)
    if any(HERMES.opening in text for text in texts):
        return HERMES
    is_llama = any("<|python_tag|>" in text or '"parameters": dictionary' in text for text in texts)
    return LLAMA if is_llama else HERMES


@dataclass(frozen=True, slots=True)
class Text:
    """Text beside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call, by its index, and the tool's name."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments: a piece of JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


Piece = Text | CallBegins | Arguments | Reasoning


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


class _State(Enum):
    TEXT = "text"
    HEAD = "head"  # behind the opening, before the arguments
    VALUE = "value"  # in the arguments
    TAIL = "tail"  # behind them, before the closing


class ToolCallParser:
    """Reads one completion.

    Args:
      form: how its model writes calls.
    """

    def __init__(self, form: ToolForm) -> None:
        self._form = form
        self._head = re.compile(
            r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_.-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
        )
        self._state = _State.TEXT if form.opening else _State.HEAD
        self._held = ""
        self._value = _ValueEnd()
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what it says."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back, now that nothing follows."""
        held, self._held = self._held, ""
        if self._state is _State.HEAD:
            return self._whole(held, held)
        return [Text(held)] if held and self._state is _State.TEXT else []

    def _step(self, pieces: list[Piece]) -> bool:
        """Take one part of what is held; return whether there may be another."""
        match self._state:
            case _State.TEXT:
                return self._take_text(pieces)
            case _State.HEAD:
                return self._take_head(pieces)
            case _State.VALUE:
                return self._take_value(pieces)
            case _State.TAIL:
                return self._take_tail()

    def _take_text(self, pieces: list[Piece]) -> bool:
        opening = self._form.opening
        if not opening:
            before, found = self._held, ""
        else:
            before, found, _ = self._held.partition(opening)
        kept = 0 if found else overlap(before, opening)
        shown = before[: len(before) - kept]
        # Blanks between two calls are not worth a text; blanks before any other are.
        if shown.strip() or (shown and not self.num_calls and not found):
            pieces.append(Text(shown))
            shown = ""
        elif not found:
            return False
        if found:
            self._held = self._held[len(before) + len(found) :]
            self._state = _State.HEAD
            return True
        self._held = self._held[len(before) - kept :]
        return False

    def _take_head(self, pieces: list[Piece]) -> bool:
        if self.num_calls and not self._form.opening:
            self._held = self._held.lstrip("; \r\n")
        if found := self._head.match(self._held):
            if found.end() == len(self._held):
                return False
            self._held = self._held[found.end() :]
            self._value = _ValueEnd()
            pieces.append(CallBegins(self.num_calls, found[1]))
            self.num_calls += 1
            self._state = _State.VALUE
            return True
        if not self._form.opening:
            return self._take_bare_head(pieces)
        body, closing, rest = self._held.partition(self._form.closing)
        if not closing:
            return False
        pieces += self._whole(body, self._form.opening + body + closing)
        self._held, self._state = rest, _State.TEXT
        return True

    def _take_bare_head(self, pieces: list[Piece]) -> bool:
        """Give up looking for a call where none can come."""
        begin = self._held.lstrip()
        if not begin or begin.startswith("{"):
            return False
        pieces.append(Text(self._held))
        self._held, self._state = "", _State.TEXT
        return False

    def _take_value(self, pieces: list[Piece]) -> bool:
        length = self._value.push(self._held)
        if length:
            pieces.append(Arguments(self.num_calls - 1, self._held[:length]))
        self._held = self._held[length:]
        if self._value.is_over:
            self._state = _State.TAIL
        return self._value.is_over

    def _take_tail(self) -> bool:
        closing = self._form.closing or "}"
        _, found, rest = self._held.partition(closing)
        if not found:
            return False
        self._held = rest
        self._state = _State.TEXT if self._form.opening else _State.HEAD
        return True

    def _whole(self, body: str, shown: str) -> list[Piece]:
        """Return the call that a body is, its keys in another order; or the text that it is."""
        try:
            call = json.loads(body)
        except ValueError:
            call = None
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            arguments = call.get("arguments", call.get("parameters", {}))
            self.num_calls += 1
            index = self.num_calls - 1
            written = json.dumps(arguments, ensure_ascii=False)
            return [CallBegins(index, call["name"]), Arguments(index, written)]
        return [Text(shown)] if shown.strip() or (shown and not self.num_calls) else []


class _ValueEnd:
    """Finds the end of a JSON value in text that arrives piece by piece."""

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def push(self, text: str) -> int:
        """Return how many characters of this belong to the value."""
        for position, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
                    self.is_over = self._depth == 0
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                if self._depth == 0:
                    # The brace behind a value that has none of its own, such as null.
                    self.is_over = True
                    return position
                self._depth -= 1
                self.is_over = self._depth == 0
            if self.is_over:
                return position + 1
        return len(text)


def overlap(text: str, word: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a word."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
