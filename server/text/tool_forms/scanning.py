"""Scans text that arrives in pieces: finds words and the ends of JSON values, and limits a body's
number of values."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

HALF_PAIR: Final = re.compile("[\ud800-\udfff]")
"""A lone surrogate, which JSON strings may contain but UTF-8 cannot encode."""


def no_constant(name: str) -> None:
    """Refuse infinities and NaN, which Python's parser accepts but JSON does not."""
    raise ValueError(f"{name} is not valid JSON")


def written(value: object) -> str:
    """Return a value as JSON.

    Raises:
      ValueError: JSON cannot represent a number.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # UTF-8 cannot encode a lone surrogate, but JSON can escape it.
    return json.dumps(value) if HALF_PAIR.search(text) else text


class ValueEnd:
    """Finds the end of a JSON value in text that arrives in pieces.

    Args:
      depth: number of brackets that are already open.
      is_one_line: whether strings end with their line, as in JSON, so that a surplus quote cannot
        swallow the following text.
    """

    def __init__(self, depth: int = 0, *, is_one_line: bool = False) -> None:
        self.is_over = False
        self._ends_string = '"\n' if is_one_line else '"'
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def push(self, text: str) -> int:
        """Return how many characters of this text belong to the value."""
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
                # A tag, since in JSON this character occurs only in strings: closing brackets are
                # missing. Or the text after a value without brackets, such as null.
                self.is_over = True
                return position
            elif character in "}]":
                self._depth -= 1
                self.is_over = self._depth == 0
            if self.is_over:
                return position + 1
        return len(text)


def first_of(text: str, words: Sequence[str]) -> tuple[int, str]:
    """Return the position of the first of some words in a text, and the word; -1 and "" if none."""
    found = [(place, word) for word in words if (place := text.find(word)) >= 0]
    return min(found, default=(-1, ""))


def before_first(text: str, words: Sequence[str]) -> tuple[str, str]:
    """Return the text before the first of some words, and that word.

    Without any of them, return the text before a possible start of one at the end.
    """
    # Most texts are a token that contains no word's first character.
    words = [word for word in words if word[0] in text]
    if not words:
        return text, ""
    begin, word = first_of(text, words)
    if word:
        return text[:begin], word
    return text[: len(text) - max(overlap(text, word) for word in words)], ""


def overlap(text: str, word: str) -> int:
    """Return how many characters at the end of a text may be the start of a word."""
    begin = text.find(word[0], max(0, len(text) - len(word) + 1))
    while begin >= 0 and not word.startswith(text[begin:]):
        begin = text.find(word[0], begin + 1)
    return len(text) - begin if begin >= 0 else 0


MAX_VALUES: Final = 1 << 20
"""Approximate maximum of values in a body: more than a context's token ids; parsed in 0.1 s."""
MAX_CONTAINERS: Final = 1 << 15
"""Maximum of arrays and objects in a body; each costs ten times a number. The longest
conversations, with one part per message, have a quarter of this."""


def holds_many_values(body: bytes) -> bool:
    """Return whether a body exceeds the limits, counting outside of strings and before parsing."""
    if len(body) <= MAX_CONTAINERS or not _has_many(body):
        return False
    if body.count(b"\\\\") > MAX_VALUES or body.count(b'\\"') > MAX_VALUES:
        return True  # checking so many escapes would take as long
    # After removing escapes, each remaining quotation mark starts or ends a string.
    rest = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return rest.count(b'"') > 2 * MAX_VALUES or _has_many(b"".join(rest.split(b'"')[::2]))


def _has_many(body: bytes) -> bool:
    num_containers = body.count(b"[") + body.count(b"{")
    return num_containers > MAX_CONTAINERS or body.count(b",") > MAX_VALUES


def parsed_arguments(text: str) -> object:
    """Return the arguments of an earlier call in the form that templates expect: an object if they
    are one.

    They were sent as a string, to which the limits on bodies do not apply.
    """
    try:
        value = text if holds_many_values(text.encode()) else json.loads(text)
        if isinstance(value, dict) and HALF_PAIR.search(
            again := json.dumps(value, ensure_ascii=False)
        ):
            value = json.loads(HALF_PAIR.sub("\ufffd", again))  # UTF-8 cannot encode it
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
