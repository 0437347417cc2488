"""Text that comes piece by piece: where words stand in it, and where a JSON value ends."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

HALF_PAIR: Final = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which a JSON string may hold and UTF-8 may not."""


def no_constant(name: str) -> None:
    """Refuse what Python takes for JSON beyond JSON: infinities and NaN."""
    raise ValueError(f"{name} is no JSON")


def written(value: object) -> str:
    """Return a value as JSON.

    Raises:
      ValueError: JSON has no such number.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair has no UTF-8; escaped it is JSON all the same.
    return json.dumps(value) if HALF_PAIR.search(text) else text


class ValueEnd:
    """Finds the end of a JSON value in text that arrives piece by piece.

    Args:
      depth: brackets that are open already.
      is_one_line: a string ends with its line, as JSON has it: a quote too many opens none that
        takes in what follows.
    """

    def __init__(self, depth: int = 0, *, is_one_line: bool = False) -> None:
        self.is_over = False
        self._ends_string = '"\n' if is_one_line else '"'
        self._depth = depth
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
                elif character in self._ends_string:
                    self._in_string = False
                    self.is_over = self._depth == 0
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character == "<" or (character in "}]," and self._depth == 0):
                # A tag, for JSON has this character in strings only: brackets were forgotten. Or
                # what stands behind a value that has no brackets of its own, such as null.
                self.is_over = True
                return position
            elif character in "}]":
                self._depth -= 1
                self.is_over = self._depth == 0
            if self.is_over:
                return position + 1
        return len(text)


def first_of(text: str, words: Sequence[str]) -> tuple[int, str]:
    """Return where the first of some words stands in a text, and which; -1 and none if nowhere."""
    found = [(place, word) for word in words if (place := text.find(word)) >= 0]
    return min(found, default=(-1, ""))


def before_first(text: str, words: Sequence[str]) -> tuple[str, str]:
    """Return what stands before the first of some words, and which word that is.

    Without any of them, it is what stands before the beginning of one at the end of the text.
    """
    # Most texts are a token without the first character of any word.
    words = [word for word in words if word[0] in text]
    if not words:
        return text, ""
    begin, word = first_of(text, words)
    if word:
        return text[:begin], word
    return text[: len(text) - max(overlap(text, word) for word in words)], ""


def overlap(text: str, word: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a word."""
    begin = text.find(word[0], max(0, len(text) - len(word) + 1))
    while begin >= 0 and not word.startswith(text[begin:]):
        begin = text.find(word[0], begin + 1)
    return len(text) - begin if begin >= 0 else 0


MAX_VALUES: Final = 1 << 20
"""In one body, about: more token ids than contexts hold, and 0.1 s of the parser."""
MAX_CONTAINERS: Final = 1 << 15
"""Arrays and objects in one body: each costs ten times what a number does. The longest
conversations have a quarter of it, with a part in each message."""


def holds_many_values(body: bytes) -> bool:
    """Count what lies between the strings, before anything is made of it."""
    if len(body) <= MAX_CONTAINERS or not _has_many(body):
        return False
    if body.count(b"\\\\") > MAX_VALUES or body.count(b'\\"') > MAX_VALUES:
        return True  # to look behind so many escapes would take as long
    # A quotation mark that is left then begins or ends a string.
    rest = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return rest.count(b'"') > 2 * MAX_VALUES or _has_many(b"".join(rest.split(b'"')[::2]))


def _has_many(body: bytes) -> bool:
    num_containers = body.count(b"[") + body.count(b"{")
    return num_containers > MAX_CONTAINERS or body.count(b",") > MAX_VALUES


def parsed_arguments(text: str) -> object:
    """Return the arguments of an earlier call as templates want them: an object, if they are.

    They came in a string, which the bounds on a body do not look into.
    """
    try:
        value = text if holds_many_values(text.encode()) else json.loads(text)
        if isinstance(value, dict) and HALF_PAIR.search(
            again := json.dumps(value, ensure_ascii=False)
        ):
            value = json.loads(HALF_PAIR.sub("\ufffd", again))  # it has no UTF-8
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
