"""The bounds of guessing ahead in decode, each beside its reason; a part of a worker's config.

It imports nothing of config.py, which holds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .errors import ConfigError
from .units import MIB

NO_GUESSES: Final = "off"
LOOKUP: Final = "lookup"


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Where decode gets guesses of coming tokens from, and how many it makes.

    A guess is computed in the same step as the token before it, and kept if it is the token that
    would have been chosen anyway. So answers are the same with and without; only speed differs.
    """

    source: str = NO_GUESSES
    """`off`; `lookup`, what followed the last tokens where they occurred before; or the directory
    of a draft model with the same vocabulary. Off by default: guesses that fail cost time."""
    max_guesses: int = 8
    """Of one sequence in one step, which then takes up to a fifth longer. A sequence is given so
    many only while all of them hold."""
    max_step_tokens: int = 16
    """Rows and guesses of a step together, or rows and further tokens of replays, guesses or not.
    On a CPU a step of 8 rows took 1.0 to 1.2 times as long as one of a single row, 16 rows 1.2 to 2
    times, 32 rows 2.8 to 3.7 times: up to here it is bound by reading weights. A step with as many
    sequences carries no guesses."""
    min_ngram: int = 2
    """Lookup: so many last tokens must have occurred before. One alone occurs everywhere."""
    max_ngram: int = 8
    """Lookup: of several places, that with the longest common past is taken; a longer one than
    this says no more."""
    max_lookback_tokens: int = 16_384
    """Lookup: older tokens are not looked at, so that a search takes a tenth of a millisecond at
    most where nothing is found."""
    min_acceptance: float = 0.2
    """Share of the guesses of a sequence, as a moving average, below which guessing does not pay
    for it."""
    pause_rows: int = 16
    """How many rows a sequence then goes without guesses, before it tries a single one again."""
    max_pause_rows: int = 256
    """The pause doubles with each trial that fails, up to this."""
    draft_pool_bytes: int = 128 * MIB
    """KV pool of the draft model, whose tokens are a fraction of the model's. A sequence that does
    not fit goes without guesses."""
    draft_chunk_tokens: int = 64
    """Prompt tokens that the draft model computes before one step: everybody's next token waits
    for them."""

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("max_guesses", self.max_guesses, 1, 64),
            ("max_step_tokens", self.max_step_tokens, 2, 4096),
            ("min_ngram", self.min_ngram, 1, self.max_ngram),
            ("pause_rows", self.pause_rows, 1, self.max_pause_rows),
            ("draft_chunk_tokens", self.draft_chunk_tokens, 1, 65_536),
        ):
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value}; allowed: {least}…{most}")

    @property
    def draft_dir(self) -> str | None:
        """The directory of the draft model, if that is where guesses come from."""
        return None if self.source in (NO_GUESSES, LOOKUP) else self.source


OFF: Final = SpeculationConfig()
