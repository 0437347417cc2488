"""How many guesses a sequence should have next, learnt from how its last ones went.

Pure arithmetic, a small state per sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from triolet.config_speculation import SpeculationConfig

TRUST: Final = 0.125
"""How far one row moves the average: some failures in a row are chance, ten are not."""
FIRST_ACCEPTANCE: Final = 0.5
"""Of what nothing is known yet: seven failures end it."""
FIRST_LENGTH: Final = 2
"""A sequence begins with few: most are not copies."""


class GuessPace:
    """Doubles the number of guesses while all hold, cuts it to what held, and pauses where too few
    do.

    Args:
      config: bounds.

    Attributes:
      acceptance: moving average of the share of guesses that held.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self.acceptance = FIRST_ACCEPTANCE
        self._config = config
        self._length = min(FIRST_LENGTH, config.max_guesses)
        self._pause_rows = config.pause_rows
        self._resting_rows = 0

    @property
    def length(self) -> int:
        """Guesses that the next row should have at most; 0 while it pauses."""
        return 0 if self._resting_rows else self._length

    def went_without(self) -> None:
        """Note a row that had no guesses."""
        self._resting_rows = max(0, self._resting_rows - 1)

    def went(self, proposed: int, accepted: int) -> None:
        """Note a row with guesses.

        Args:
          proposed: how many it had, at least one.
          accepted: how many of them held.
        """
        self.acceptance += TRUST * (accepted / proposed - self.acceptance)
        if accepted == proposed:
            self._length = min(self._config.max_guesses, 2 * self._length)
            if self.acceptance >= self._config.min_acceptance:
                self._pause_rows = self._config.pause_rows
        else:
            self._length = max(1, accepted)
        if self.acceptance < self._config.min_acceptance:
            self._rest()

    def _rest(self) -> None:
        self._resting_rows = self._pause_rows
        self._pause_rows = min(self._config.max_pause_rows, 2 * self._pause_rows)
        # One guess decides then: if it holds, on with it, and if not, on with the pause.
        self.acceptance = self._config.min_acceptance
        self._length = 1
