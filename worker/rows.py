"""What a step chose, as servers are told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.frames import TokenRow, TopToken

if TYPE_CHECKING:
    from engine.batch import Sampled
    from triolet.ids import AttemptKey


def token_row(key: AttemptKey, position: int, sampled: Sampled) -> TokenRow:
    """Return the row that carries a chosen token."""
    return TokenRow(
        *key,
        position=position,
        token_id=sampled.token_id,
        logprob=sampled.logprob,
        top=tuple(TopToken(token_id, logprob) for token_id, logprob in sampled.top),
    )
