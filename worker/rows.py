"""Convert the result of a step's row into a row of a TOKENS frame, or an end reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.batch import Barred
from transport.frames import EndReason, TokenRow, TopToken

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.batch import Sampled
    from triolet.ids import AttemptKey

ENDS: Final[Mapping[Barred, tuple[EndReason, str]]] = {
    Barred.STUCK: (EndReason.STUCK, ""),
    Barred.TOO_COSTLY: (EndReason.TOO_COSTLY, ""),
    Barred.NOT_FINITE: (
        EndReason.ERROR,
        "the model computed logits that are not finite: its weights or this device are damaged",
    ),
}
"""End reason and message of an attempt that gets no token; one with a late mask continues."""


def token_row(key: AttemptKey, position: int, sampled: Sampled) -> TokenRow:
    """Return the row for a chosen token."""
    return TokenRow(
        *key,
        position=position,
        token_id=sampled.token_id,
        logprob=sampled.logprob,
        top=tuple(TopToken(token_id, logprob) for token_id, logprob in sampled.top),
    )
