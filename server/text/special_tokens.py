"""Keeps special tokens in user content separate from those that the chat template writes.

A template joins both into one string, and a tokenizer would take `<|im_end|>` in a user's message
for the end of the message. So special tokens in user content are replaced by placeholders before
rendering. Afterwards, the template's special tokens become unguessable markers, and placeholders
become plain text again.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Self, TypeVar, cast

from tokenizers import AddedToken, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_T = TypeVar("_T")


class SpecialTokenGuard:
    """The special tokens of a tokenizer, with random names for them.

    Args:
      contents: the special tokens as text.
      nonce: an unguessable part of the names.
    """

    def __init__(self, contents: Sequence[str], nonce: str) -> None:
        # Only letters and digits, so that it survives tojson, quoting and trimming in a template.
        self._nonce = nonce
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
        """The names of the special tokens, in the order of `contents`."""
        return tuple(f"x{self._nonce}t{i}x" for i in range(len(self._contents)))

    def protect(self, value: _T) -> _T:
        """Return `value` with placeholders for special tokens in all of its strings, at any
        depth."""
        return cast("_T", self._protected(value))

    def with_markers(self, rendered: str) -> str:
        """Return a rendered template for a tokenizer that has the markers as tokens."""
        return self._rendered.sub(self._marker_or_text, rendered)

    def as_text(self, rendered: str) -> str:
        """Return a rendered template as readable text."""
        return self._rendered.sub(lambda m: m[1] or self._contents[int(m[2])], rendered)

    def least_chars(self, rendered: str) -> int:
        """Return a lower bound of the length of `as_text`, quickly."""
        num_placeholders = rendered.count(f"x{self._nonce}u")
        return len(rendered) - num_placeholders * self._longest

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


class ChatPrompt(str):
    """A rendered conversation as readable text, which also keeps the template's special tokens
    apart from those in user content. Strings derived from it, such as slices, lose this: when
    encoded, special tokens in user content take effect.

    Attributes:
      marked: the same text with markers for the template's special tokens.
    """

    __slots__ = ("marked",)

    marked: str

    def __new__(cls, text: str, marked: str) -> Self:
        prompt = super().__new__(cls, text)
        prompt.marked = marked
        return prompt

    def up_to(self, mark: str) -> ChatPrompt | None:
        """Return the part before a mark; None unless the mark occurs exactly once."""
        before, *others = self.split(mark)
        marked_before, *_ = self.marked.split(mark)
        return ChatPrompt(before, marked_before) if len(others) == 1 else None


def literal_tokenizer(
    tokenizer: Tokenizer, specials: Mapping[int, AddedToken], markers: Sequence[str]
) -> tuple[Tokenizer, dict[int, int]]:
    """Return a copy of a tokenizer that treats special tokens as plain text, and has the markers.

    Returns:
      The copy, and the special token's id by its marker's id.
    """
    literal = Tokenizer.from_str(tokenizer.to_str())
    literal.add_tokens(
        [
            AddedToken(marker, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
            for marker, token in zip(markers, specials.values(), strict=True)
        ]
    )
    # Disables special tokens; the markers are not special.
    literal.encode_special_tokens = True
    id_of_marker = {}
    for marker, special_id in zip(markers, specials, strict=True):
        marker_id = literal.token_to_id(marker)
        assert marker_id is not None, "the marker was added above"
        id_of_marker[marker_id] = special_id
    return literal, id_of_marker
