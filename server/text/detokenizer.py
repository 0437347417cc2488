"""Turns the ids of one completion into text, id by id.

Knows the tokenizer's own incremental decoder and how to go on where that gives up; refuses to know
requests and stop strings. Text comes out only at character borders, so a reader never sees half of
a character, and the pieces joined are what decoding all ids at once gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenizers import Tokenizer

CONTEXT_TOKENS: Final = 8
"""Tokens of the prompt that the first piece is decoded after: whether a word-start token shows its
space depends on there being text before it. A character has at most four byte tokens."""
MAX_PENDING_TOKENS: Final = 64
"""Ids without a character border, after which they are shown as they are. No character is that
long, so this is noise of the model; each further id would cost a decode of all of them."""
REPLACEMENT: Final = "\ufffd"


def _not_plain(token_id: int) -> None:
    """Say of no id what it adds."""


class Detokenizer:
    """The text of one completion.

    Args:
      tokenizer: of the model.
      anchor_ids: an ordinary token (or none, if the vocabulary has no such): text is decoded after
        it where there is no other context.
      prompt_ids: what the completion continues.
      skip_special_tokens: leave special tokens out of the text.
      plain_text: what an id adds to any text that ends with a whole character, if it does so
        without regard to that text: most ids of vocabularies of bytes. A tenth of the decoder's
        cost, which need not see them then.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        anchor_ids: Sequence[int],
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        plain_text: Callable[[int], str | None] = _not_plain,
    ) -> None:
        self._tokenizer = tokenizer
        self._anchor_ids = list(anchor_ids)
        self._skip_special_tokens = skip_special_tokens
        self._plain_text = plain_text
        self._pending: list[int] = []
        context = list(prompt_ids[-CONTEXT_TOKENS:])
        if self._decode(context).endswith(REPLACEMENT):
            # The prompt ends within a character: the decoder would show its rest as completion.
            context = self._anchor_ids
        self._context = context
        self._stream = self._new_stream(context)

    def push(self, token_id: int) -> str:
        """Return the text that this id completes; empty within a character."""
        if not self._pending and (text := self._plain_text(token_id)) is not None:
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
