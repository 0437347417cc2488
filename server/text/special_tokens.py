"""Keeps special tokens that a user wrote apart from those that the chat template wrote.

A template joins both into one string, and a tokenizer would take `<|im_end|>` in a user's message
for the end of that message. So every occurrence in user content is replaced by a placeholder before
rendering; afterwards the template's own become markers that no one can guess, and the placeholders
turn back into plain text. Knows strings only; refuses to know templates and tokenizers.

The texts may be megabytes, and a search holds the interpreter's lock until it finds something. So
it goes through a window at a time, between which other threads have their turn.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Final, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_T = TypeVar("_T")

WINDOW_CHARS: Final = 64 * 1024
"""Searched at once, in about a millisecond."""


class SpecialTokenGuard:
    """The special tokens of one tokenizer, and random names for them.

    Args:
      contents: the special tokens as text.
    """

    def __init__(self, contents: Sequence[str]) -> None:
        # Letters and digits only: survives tojson, quoting and trimming in a template. 64 random
        # bits per process: a user cannot write one.
        self._nonce = secrets.token_hex(8)
        self._contents = tuple(contents)
        longest_first = sorted(self._contents, key=len, reverse=True)
        specials = "|".join(re.escape(content) for content in longest_first)
        # An empty alternative would match everywhere.
        self._special = re.compile(specials or r"(?!)")
        self._rendered = re.compile(f"({specials or '(?!)'})|x{self._nonce}u([0-9]+)x")
        self._index = {content: i for i, content in enumerate(self._contents)}
        self._longest = max(
            map(len, (*self._contents, f"x{self._nonce}u{len(self._contents)}x")), default=0
        )

    @property
    def markers(self) -> tuple[str, ...]:
        """The names that stand for the special tokens, in the order of `contents`."""
        return tuple(f"x{self._nonce}t{i}x" for i in range(len(self._contents)))

    def protect(self, value: _T) -> _T:
        """Return `value` with placeholders for special tokens in all its strings, at any depth."""
        return cast("_T", self._protected(value))

    def with_markers(self, rendered: str) -> str:
        """Return a rendered template for a tokenizer that knows the markers as tokens."""
        return self._replaced(self._rendered, self._marker_or_text, rendered)

    def as_text(self, rendered: str) -> str:
        """Return a rendered template as a person would read it."""
        return self._replaced(self._rendered, lambda m: m[1] or self._contents[int(m[2])], rendered)

    def least_chars(self, rendered: str) -> int:
        """Return what `as_text` has at least, without the time that it takes."""
        num_placeholders = rendered.count(f"x{self._nonce}u")
        return len(rendered) - num_placeholders * self._longest

    def _protected(self, value: object) -> object:
        if isinstance(value, str):
            return self._replaced(self._special, self._placeholder, value)
        if isinstance(value, dict):
            return {self._protected(k): self._protected(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._protected(item) for item in value]
        return value

    def _replaced(
        self, pattern: re.Pattern[str], replace: Callable[[re.Match[str]], str], text: str
    ) -> str:
        """Return `pattern.sub(replace, text)`, looked for through one window after the other."""
        pieces: list[str] = []
        copied = begin = 0
        while begin < len(text):
            end = begin + WINDOW_CHARS
            # Whatever begins in the window is seen as a whole.
            for match in pattern.finditer(text, begin, end + self._longest):
                if match.start() >= end:
                    break
                pieces += text[copied : match.start()], replace(match)
                copied = match.end()
            begin = max(end, copied)
        return "".join((*pieces, text[copied:])) if copied else text

    def _placeholder(self, match: re.Match[str]) -> str:
        return f"x{self._nonce}u{self._index[match[0]]}x"

    def _marker_or_text(self, match: re.Match[str]) -> str:
        if match[1] is not None:
            return f"x{self._nonce}t{self._index[match[1]]}x"
        return self._contents[int(match[2])]
