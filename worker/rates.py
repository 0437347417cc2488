"""How fast a worker's steps are, told to servers with every heartbeat.

Pure arithmetic over the steps that were taken. Knows nothing of what the numbers decide: where a
prompt is computed is the server's to say, how much of one a decode step takes is `chunk_tokens`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from engine.pace import Pace

TRUST: Final = 0.2
"""How far one step moves what is believed: a hiccup is forgotten after some steps, a busy neighbour
believed after some."""
FORGETTING: Final = 0.01
"""How far a step without prompts moves what is believed of prompts back to what was found out at
the start: a worker once believed slow is asked for none, and would be believed slow for ever."""
MIN_TOKENS: Final = 32
"""A step with fewer prompt tokens mostly reads weights, and says little of a rate."""
LEAST_SHARE: Final = 0.1
"""A prompt's tokens took at least this share of the step that they were in: the step without them
is known from other steps only, and may have been slower for once."""

READING_GAIN: Final = 0.5
"""What each core more brings to a step without prompts, beside what the first one did: all read
from one memory. Measured on two cores, 10.3 ms against 15.7."""
LEAST_STEP_S: Final = 1e-6
"""No step is faster; a clock that stood still says nothing."""


class StepRates:
    """Rates of one worker.

    Args:
      pace: what was found out at the start, which holds until steps say better.

    Attributes:
      prompt_tokens_per_s: prompt tokens that a second of computing yields.
      step_s: of the usual step: decode's without prompt tokens, prefill's as they come. 0 before
        there was any.
    """

    def __init__(self, pace: Pace) -> None:
        self._first_rate = pace.step_tokens / pace.step_s if pace.step_s > 0.0 else 0.0
        self.prompt_tokens_per_s = self._first_rate
        self.step_s = 0.0
        self._pace = pace

    def took(
        self,
        elapsed_s: float,
        *,
        num_prompt_tokens: int,
        num_decode_rows: int = 0,
        speedup: float = 1.0,
    ) -> None:
        """Learn from a step.

        Args:
          elapsed_s: that it took.
          num_prompt_tokens: that it computed.
          num_decode_rows: that it had besides.
          speedup: how many times as many cores as its own it had: others want theirs back at any
            time, so what is believed is what its own can do.
        """
        if elapsed_s < LEAST_STEP_S:
            return
        if not (num_prompt_tokens and num_decode_rows):
            gain = 1.0 if num_prompt_tokens else READING_GAIN
            self.step_s = _moved(self.step_s, elapsed_s * (1.0 + gain * (speedup - 1.0)))
        if num_prompt_tokens >= MIN_TOKENS:
            own_s = elapsed_s * speedup
            rows_s = self.step_s if num_decode_rows else 0.0
            prompt_s = max(own_s - rows_s, LEAST_SHARE * own_s)
            self.prompt_tokens_per_s = _moved(
                self.prompt_tokens_per_s, num_prompt_tokens / prompt_s
            )
        elif not num_prompt_tokens and self._first_rate:
            self.prompt_tokens_per_s += FORGETTING * (self._first_rate - self.prompt_tokens_per_s)

    def chunk_tokens(self, num_decode_rows: int) -> int:
        """Return how many prompt tokens decode's next step may hold.

        Beside running streams at most the setting's, and as many as keep the step within its
        target; at least a block, for a prompt has to get on. Alone, a prompt is only held back by
        the target.
        """
        pace = self._pace
        rows_s = self.step_s if num_decode_rows else 0.0
        most = pace.chunk_tokens if num_decode_rows else pace.most_tokens
        affordable = int((pace.target_s - rows_s) * self.prompt_tokens_per_s)
        return max(min(most, affordable), pace.least_tokens)


def _moved(believed: float, seen: float) -> float:
    return believed + TRUST * (seen - believed) if believed else seen
