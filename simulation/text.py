"""Text without a tokenizer: the text of a token is its number.

The expected text therefore follows from the tokens, and can contain stop strings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.text.detokenizer import TokenText

from .engine import EOS_ID, MAX_MODEL_LEN

if TYPE_CHECKING:
    from collections.abc import Sequence


def text_of(token_id: int) -> str:
    """Return the text of one token."""
    return f"{token_id},"


class NumberStream:
    """An incremental detokenizer that never waits for more tokens."""

    def push(self, token_id: int) -> str:
        """Return a token's text."""
        return text_of(token_id)

    def flush(self) -> str:
        """Return an empty text, because nothing is buffered."""
        return ""


class NumberText:
    """See server.scheduling.output.RelayText."""

    eos_token_ids: tuple[int, ...] = (EOS_ID,)
    max_model_len: int = MAX_MODEL_LEN

    def detokenizer(
        self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> NumberStream:
        """Return a decoder for one completion."""
        del prompt_ids, skip_special_tokens
        return NumberStream()

    def token(self, token_id: int) -> TokenText:
        """Return the text of one token by itself."""
        return TokenText(text_of(token_id), text_of(token_id).encode())
