"""Incremental detokenization, texts of single tokens, and stop strings.

Stop strings match characters, independent of token boundaries: the first one completed wins, and of
several completed together, the longest.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace
from tokenizers.decoders import DecodeStream

from ..contract.generation import Delta
from ..contract.output_stage import OutputStage
from .tool_forms.scanning import overlap

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenizers import Tokenizer

    from ..contract.generation import Event


_BYTE_FALLBACK: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK: Final = "\u2581"


class TokenText(NamedTuple):
    """The text of one token alone.

    Attributes:
      text: its text; a replacement character if it is part of a character.
      raw: its bytes.
    """

    text: str
    raw: bytes


class Vocabulary:
    """Texts of single tokens, and two properties of the vocabulary.

    Args:
      tokenizer: the model's tokenizer.

    Attributes:
      longest_token_bytes: maximum number of bytes of a token.
      anchor_ids: an ordinary token to decode others after, or nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items()}
        self._byte_of = _byte_level_alphabet() if _is_byte_level(tokenizer) else {}
        self._is_bytes_only = _decoder_of(tokenizer).get("type") == "ByteLevel"
        # Limited by the vocabulary's size.
        self._known: dict[int, TokenText] = {}
        self._plain: dict[int, str | None] = {}
        pieces = tokenizer.get_vocab(with_added_tokens=True)
        self.longest_token_bytes = max((len(p.encode()) for p in pieces), default=1)
        anchors = (tokenizer.token_to_id(letter) for letter in "aeionrst")
        self.anchor_ids = tuple(i for i in anchors if i is not None)[:1]

    def token(self, token_id: int) -> TokenText:
        """Return the text of one id; empty for an id that the tokenizer does not have."""
        known = self._known.get(token_id)
        if known is None:
            known = self._read(token_id)
            self._known[token_id] = known
        return known

    def plain_text(self, token_id: int) -> str | None:
        """Return the text that an id adds after any text that ends with a complete character; None
        if it may depend on that text."""
        try:
            return self._plain[token_id]
        except KeyError:
            pass  # not cached yet
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
        """Decode after an anchor token: alone, a word-start token would lose its space."""
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
    """Return the byte of each character in byte-level vocabularies.

    Source: GPT-2. Bytes that are visible Latin-1 characters map to themselves; the others map, in
    order, to code points from 256 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    alphabet = {chr(byte): bytes([byte]) for byte in visible}
    alphabet.update({chr(256 + n): bytes([byte]) for n, byte in enumerate(hidden)})
    return alphabet


class StopStrings(OutputStage):
    """The output stage that ends a text at a stop string. It holds back only text that may be the
    start of one.

    Args:
      stop: the strings, none empty.
      include_stop: whether to keep the stop string in the text.

    Attributes:
      matched: the stop string that ended the text; None before.
    """

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool = False) -> None:
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self._stop = stop
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, event: Event) -> Sequence[Event]:
        """Pass on the text that may be shown. Must not be called after a match."""
        if not self._stop or not isinstance(event, Delta):
            return (event,)
        text = self._held + event.text
        matches = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if matches:
            end, begin, self.matched = min(matches)
            self._held = ""
            cut = end if self._include_stop else begin
        else:
            cut = len(text) - max(overlap(text, s) for s in self._stop)
            self._held = text[cut:]
        return (replace(event, text=text[:cut]),)

    def finish(self) -> Sequence[Event]:
        """Return the text held back."""
        held, self._held = self._held, ""
        return (Delta(held, ()),) if held else ()


CONTEXT_TOKENS: Final = 8
"""Prompt tokens to decode before the first piece: a word-start token shows its space only after
other text. A character has at most four byte tokens."""
MAX_PENDING_TOKENS: Final = 64
"""Ids without a character boundary before they are shown anyway. No character is that long, so this
is noise, and each further id would decode all of them again."""
REPLACEMENT: Final = "\ufffd"


class Detokenizer:
    """Detokenizes one completion incrementally.

    Args:
      tokenizer: the model's tokenizer.
      anchor_ids: an ordinary token (or none if the vocabulary has none) to decode after if there is
        no other context.
      prompt_ids: the prompt of the completion.
      skip_special_tokens: whether to leave special tokens out of the text.
      vocabulary: provides the text of ids that do not depend on their context, which are most ids
        of byte-level vocabularies. Takes a tenth of the time of decoding. None to decode all ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        anchor_ids: Sequence[int],
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._anchor_ids = list(anchor_ids)
        self._skip_special_tokens = skip_special_tokens
        self._vocabulary = vocabulary
        self._pending: list[int] = []
        context = list(prompt_ids[-CONTEXT_TOKENS:])
        if self._decode(context).endswith(REPLACEMENT):
            # The prompt ends within a character, and its rest would be shown as completion.
            context = self._anchor_ids
        self._context = context
        self._stream = self._new_stream(context)

    def push(self, token_id: int) -> str:
        """Return the text that an id completes; empty within a character."""
        vocabulary = self._vocabulary
        if vocabulary is not None and not self._pending:
            text = vocabulary.plain_text(token_id)
            if text is not None:
                return text
        self._pending.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001 (the library raises plain Exception)
            # An invalid byte changed how earlier bytes decode, but their text is already shown.
            # Keep it, and decode what came since separately.
            self._context = self._anchor_ids
            return self._restart(self._pending_text())
        if piece is not None:
            self._pending.clear()
            self._context = self._anchor_ids
            return str(piece)
        if len(self._pending) >= MAX_PENDING_TOKENS:
            return self._restart(self._pending_text())
        return ""

    def flush(self) -> str:
        """Return the rest of an incomplete character at the end."""
        return self._restart(self._pending_text()) if self._pending else ""

    def _restart(self, text: str) -> str:
        self._pending.clear()
        self._context = self._anchor_ids
        self._stream = self._new_stream(self._anchor_ids)
        return text

    def _pending_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _new_stream(self, context: Sequence[int]) -> DecodeStream:
        return DecodeStream(ids=list(context), skip_special_tokens=self._skip_special_tokens)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens))
