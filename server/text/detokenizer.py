"""Text of single tokens and of completions, and stop strings in it.

Stop strings depend on the characters, never on how they were cut into pieces: the stop string that
is complete first wins, and of those that end together the longest.
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
        try:
            return self._plain[token_id]
        except KeyError:
            pass  # not asked for yet
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


class StopStrings(OutputStage):
    """The output stage that ends a text at a stop string. It holds back only what may be the
    beginning of one.

    Args:
      stop: the strings, none empty.
      include_stop: the text ends behind the stop string instead of before it.

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
        """Pass on the text that may be shown. After a match nothing more may be pushed."""
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
        """Return what was held back."""
        held, self._held = self._held, ""
        return (Delta(held, ()),) if held else ()


CONTEXT_TOKENS: Final = 8
"""Tokens of the prompt that the first piece is decoded after: whether a word-start token shows its
space depends on there being text before it. A character has at most four byte tokens."""
MAX_PENDING_TOKENS: Final = 64
"""Ids without a character border, after which they are shown as they are. No character is that
long, so this is noise of the model; each further id would cost a decode of all of them."""
REPLACEMENT: Final = "\ufffd"


class Detokenizer:
    """The text of one completion.

    Args:
      tokenizer: of the model.
      anchor_ids: an ordinary token (or none, if the vocabulary has no such): text is decoded after
        it where there is no other context.
      prompt_ids: what the completion continues.
      skip_special_tokens: leave special tokens out of the text.
      vocabulary: says what an id adds to any text that ends with a whole character, if it does so
        without regard to that text: most ids of vocabularies of bytes. A tenth of the decoder's
        cost, which need not see them then. None to have it see all.
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
            # The prompt ends within a character: the decoder would show its rest as completion.
            context = self._anchor_ids
        self._context = context
        self._stream = self._new_stream(context)

    def push(self, token_id: int) -> str:
        """Return the text that this id completes; empty within a character."""
        vocabulary = self._vocabulary
        if vocabulary is not None and not self._pending:
            text = vocabulary.plain_text(token_id)
            if text is not None:
                return text
        self._pending.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001 (the library raises plain Exception, nothing narrower)
            # A byte that fits no character changed how the bytes before it decode, which are shown
            # already. Those stand; what came since is decoded by itself.
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
        """Return what is left of an unfinished character: no more ids come."""
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
