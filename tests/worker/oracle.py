"""A source of guesses for tests of speculative decoding: tokens of the scripted engine, some of
them wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .scripts import VOCAB_SIZE, completion

if TYPE_CHECKING:
    from decode.attempt import DecodeAttempt
    from triolet.ids import AttemptKey


class Oracle:
    """See decode.speculation.GuessSource.

    Args:
      wrong_every: every guess at a position that is a multiple of this is wrong; 0 for none.

    Attributes:
      known: attempts that it was asked for and that have not ended.
    """

    ledger = None

    def __init__(self, wrong_every: int = 0) -> None:
        self.known: set[AttemptKey] = set()
        self._wrong_every = wrong_every

    def guess(self, attempt: DecodeAttempt, most: int) -> list[int]:
        """Return exactly the requested number of guesses."""
        self.known.add(attempt.key)
        position = len(attempt.output_ids)
        tokens = completion(attempt.prompt_ids, attempt.sampling.seed, position + most)
        return [
            (token + self._is_wrong(position + i)) % VOCAB_SIZE
            for i, token in enumerate(tokens[position:])
        ]

    def forget(self, key: AttemptKey) -> None:
        """See GuessSource."""
        self.known.discard(key)

    def _is_wrong(self, position: int) -> bool:
        return self._wrong_every > 0 and position % self._wrong_every == 0
