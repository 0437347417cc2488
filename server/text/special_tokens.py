"""Keeps special tokens that a user wrote apart from those that the chat template wrote.

A template joins both into one string, and a tokenizer would take `<|im_end|>` in a user's message
for the end of that message. So every occurrence in user content is replaced by a placeholder before
rendering; afterwards the template's own become markers that no one can guess, and the placeholders
turn back into plain text. Knows strings only; refuses to know templates and tokenizers.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

_T = TypeVar("_T")


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

    @property
    def markers(self) -> tuple[str, ...]:
        """The names that stand for the special tokens, in the order of `contents`."""
        return tuple(f"x{self._nonce}t{i}x" for i in range(len(self._contents)))

    def protect(self, value: _T) -> _T:
        """Return `value` with placeholders for special tokens in all its strings, at any depth."""
        return cast("_T", self._protected(value))

    def with_markers(self, rendered: str) -> str:
        """Return a rendered template for a tokenizer that knows the markers as tokens."""
        return self._rendered.sub(self._marker_or_text, rendered)

    def as_text(self, rendered: str) -> str:
        """Return a rendered template as a person would read it."""
        return self._rendered.sub(lambda m: m[1] or self._contents[int(m[2])], rendered)

    def _protected(self, value: object) -> object:
        if isinstance(value, str):
            return self._special.sub(self._placeholder, value)
        if isinstance(value, dict):
            return {self._protected(k): self._protected(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._protected(item) for item in value]
        return value

    def _placeholder(self, match: re.Match[str]) -> str:
        return f"x{self._nonce}u{self._index[match[0]]}x"

    def _marker_or_text(self, match: re.Match[str]) -> str:
        if match[1] is not None:
            return f"x{self._nonce}t{self._index[match[1]]}x"
        return self._contents[int(match[2])]
