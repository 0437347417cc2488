"""Guesses of coming tokens for simulated decode workers: what is right, and sometimes not.

Knows what the simulated engine computes; see decode.speculation.GuessSource.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from triolet.config import SpeculationConfig

from .engine import VOCAB_SIZE, reference

if TYPE_CHECKING:
    from decode.attempt import Attempt
    from triolet.ids import AttemptKey

EAGER: Final = SpeculationConfig(max_guesses=4, max_step_tokens=12, pause_rows=1, max_pause_rows=2)
"""Small as everything is here; pauses would mostly outlast an answer."""
WRONG_ONE_IN: Final = 4


class Guesses:
    """Knows every completion before it is computed."""

    ledger = None

    def __init__(self) -> None:
        self._completions: dict[AttemptKey, tuple[int, ...]] = {}

    def guess(self, attempt: Attempt, most: int) -> list[int]:
        """Return tokens that follow; which are wrong depends on seed and position alone."""
        if attempt.key not in self._completions:
            self._completions[attempt.key] = reference(attempt.prompt_ids, attempt.sampling)
        position, seed = len(attempt.output_ids), attempt.sampling.seed
        right = self._completions[attempt.key][position : position + most]
        return [
            (token_id + ((position + i) * 7 + seed) % WRONG_ONE_IN // (WRONG_ONE_IN - 1))
            % VOCAB_SIZE
            for i, token_id in enumerate(right)
        ]

    def forget(self, key: AttemptKey) -> None:
        """Forget an attempt that has ended."""
        self._completions.pop(key, None)
