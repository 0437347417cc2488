"""Guesses by looking up what followed the last tokens where they occurred before.

Knows token ids; knows no text and no model. Source: prompt lookup decoding (Saxena 2023), with
overlap as in LZ77, so that a repetition continues itself.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.config_speculation import SpeculationConfig
    from triolet.ids import AttemptKey

    from .attempt import Attempt

WORD_BYTES = array("I").itemsize


class History:
    """The tokens of one sequence as packed words, which C code can search.

    Args:
      token_ids: so far.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._words = array("I", token_ids)

    def __len__(self) -> int:
        return len(self._words)

    def append(self, token_ids: Sequence[int]) -> None:
        """Add what has been decided since."""
        self._words.extend(token_ids)

    def guess(self, most: int, config: SpeculationConfig) -> tuple[int, ...]:
        """Return up to `most` tokens that may follow; none if nothing of the kind occurred.

        Of the places where the last `min_ngram` tokens stand, the one with the longest common past
        wins, of equals the latest.
        """
        words = self._words[-config.max_lookback_tokens :]
        if most < 1 or len(words) <= config.min_ngram:
            return ()
        after = _best_place(words, config)
        if after is None:
            return ()
        guesses = list(words[after : after + most])
        while len(guesses) < most:
            # The place reaches up to the end: what it is followed by are the guesses themselves.
            guesses += guesses[: most - len(guesses)]
        return tuple(guesses)


class Lookup:
    """Guesses for many sequences; see speculation.GuessSource.

    Args:
      config: bounds.
    """

    ledger = None

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._histories: dict[AttemptKey, History] = {}

    def guess(self, attempt: Attempt, most: int) -> Sequence[int]:
        """Return up to `most` tokens that may follow what an attempt has."""
        history = self._histories.get(attempt.key)
        if history is None:
            history = self._histories[attempt.key] = History(attempt.prompt_ids)
        history.append(attempt.output_ids[len(history) - len(attempt.prompt_ids) :])
        return history.guess(most, self._config)

    def forget(self, key: AttemptKey) -> None:
        """Forget an attempt that has ended."""
        self._histories.pop(key, None)


def _best_place(words: array[int], config: SpeculationConfig) -> int | None:
    """Return the index behind the best earlier occurrence of the last tokens."""
    packed = words.tobytes()
    # Where not even the shortest pattern occurs, as in most text, that is all there is to search.
    after = _find(packed, config.min_ngram, len(packed) - WORD_BYTES)
    if after is None:
        return None
    for length in range(min(config.max_ngram, len(words) - 1), config.min_ngram, -1):
        better = _find(packed, length, after * WORD_BYTES)
        if better is not None:
            return better
    return after


def _find(packed: bytes, length: int, end: int) -> int | None:
    """Return the index behind the latest place before byte `end` where the last tokens stand."""
    pattern = packed[-length * WORD_BYTES :]
    while (at := packed.rfind(pattern, 0, end)) >= 0:
        if at % WORD_BYTES == 0:
            return at // WORD_BYTES + length
        # It begins within a token: bytes of zero look alike. The next one begins earlier.
        end = at + len(pattern) - 1
    return None
