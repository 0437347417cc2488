"""What a single token says: its text and its bytes, for logprobs and for people.

Knows how the usual tokenizers write bytes into vocabulary entries; refuses to decode sequences
(detokenizer.py does), because a token's text alone is not what it adds to a sequence.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

_BYTE_FALLBACK: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK: Final = "\u2581"


class TokenText(NamedTuple):
    """One token by itself.

    Attributes:
      text: as text; a replacement character stands for part of one.
      raw: the bytes that it stands for.
    """

    text: str
    raw: bytes


class Vocabulary:
    """Texts of single tokens, and two facts about all of them.

    Args:
      tokenizer: of the model.

    Attributes:
      longest_token_bytes: no token stands for more bytes than this.
      anchor_ids: an ordinary token to decode others after, or nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items()}
        self._byte_of = _byte_level_alphabet() if _is_byte_level(tokenizer) else {}
        self._is_bytes_only = _decoder_of(tokenizer).get("type") == "ByteLevel"
        # Bounded by the vocabulary.
        self._known: dict[int, TokenText] = {}
        self._plain: dict[int, str | None] = {}
        pieces = tokenizer.get_vocab(with_added_tokens=True)
        self.longest_token_bytes = max((len(p.encode()) for p in pieces), default=1)
        anchors = (tokenizer.token_to_id(letter) for letter in "aeionrst")
        self.anchor_ids = tuple(i for i in anchors if i is not None)[:1]

    def token(self, token_id: int) -> TokenText:
        """Return what one id says; empty for an id that the tokenizer does not have."""
        known = self._known.get(token_id)
        if known is None:
            known = self._read(token_id)
            self._known[token_id] = known
        return known

    def plain_text(self, token_id: int) -> str | None:
        """Return what an id adds to a text whatever stands before it, as long as that ends with a
        whole character; None if it may depend on more."""
        if token_id in self._plain:
            return self._plain[token_id]
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return None
        text = self._plain[token_id] = self._read_plain(token_id, piece)
        return text

    def _read_plain(self, token_id: int, piece: str) -> str | None:
        if not self._is_bytes_only or token_id in self._added:
            return None
        if not all(char in self._byte_of for char in piece):
            return None
        try:
            return b"".join(self._byte_of[char] for char in piece).decode()
        except UnicodeDecodeError:  # part of a character
            return None

    def _read(self, token_id: int) -> TokenText:
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return TokenText("", b"")
        if token_id in self._added:
            return TokenText(piece, piece.encode())
        if self._byte_of:
            raw = b"".join(self._byte_of.get(char, char.encode()) for char in piece)
        elif match := _BYTE_FALLBACK.fullmatch(piece):
            raw = bytes([int(match[1], 16)])
        else:
            raw = self._text_behind_anchor(token_id, piece).encode()
        return TokenText(raw.decode(errors="replace"), raw)

    def _text_behind_anchor(self, token_id: int, piece: str) -> str:
        """Decode within a sequence: by itself a word-start token would lose its space."""
        if not self.anchor_ids:
            return piece.replace(_SPACE_MARK, " ")
        before = str(self._tokenizer.decode(self.anchor_ids))
        both = str(self._tokenizer.decode([*self.anchor_ids, token_id]))
        return both[len(before) :]


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return any(part.get("type") == "ByteLevel" for part in _parts(_decoder_of(tokenizer)))


def _decoder_of(tokenizer: Tokenizer) -> dict[str, object]:
    return json.loads(tokenizer.to_str()).get("decoder") or {}


def _parts(decoder: dict[str, object]) -> Iterator[dict[str, object]]:
    yield decoder
    nested = decoder.get("decoders")
    if isinstance(nested, list):
        for part in nested:
            yield from _parts(part)


def _byte_level_alphabet() -> dict[str, bytes]:
    """Return the byte for each character of byte-level vocabularies.

    Source: GPT-2. Bytes that are visible characters in Latin-1 stand for themselves, the others are
    shifted, in order, to code points from 256 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    alphabet = {chr(byte): bytes([byte]) for byte in visible}
    alphabet.update({chr(256 + n): bytes([byte]) for n, byte in enumerate(hidden)})
    return alphabet
