"""Estimate the speed of a worker's steps, for the servers' routing and for decode's prompt chunks.

Pure arithmetic over past steps. Servers use the rates to decide where a prompt is computed;
`chunk_tokens` sets the number of prompt tokens in a decode step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from engine.pace import Pace

TRUST: Final = 0.2
"""Weight of one step in the estimate: a hiccup is forgotten after a few steps, and a busy neighbour
is believed after a few."""
FORGETTING: Final = 0.01
"""How far a step without prompts moves the prompt rate back to the one measured at the start: a
worker considered slow gets no prompts, and would otherwise be considered slow forever."""
MIN_TOKENS: Final = 32
"""Steps with fewer prompt tokens mostly read weights, and say little about the rate."""
LEAST_SHARE: Final = 0.1
"""Prompt tokens count for at least this share of their step's time: the time without them is only
known from other steps, and may have been longer."""

READING_GAIN: Final = 0.5
"""Gain of each further core in a step without prompts, relative to the first: all read from one
memory. Measured on two cores: 10.3 ms instead of 15.7."""
LEAST_STEP_S: Final = 1e-6
"""No step is faster; a clock that stood still gives no information."""


class StepRates:
    """Rates of one worker.

    Args:
      pace: measured at the start, used until steps give better values.

    Attributes:
      prompt_tokens_per_s: prompt tokens per second of computing.
      step_s: usual step time: for decode without prompt tokens, for prefill as measured. 0 before
        the first step.
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
          elapsed_s: duration of the step.
          num_prompt_tokens: prompt tokens in it.
          num_decode_rows: decode rows in it.
          speedup: its cores divided by the worker's own. Rates are for the worker's own cores,
            because others may want theirs back at any time.
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

        Beside running streams at most the setting's number, and as many as keep the step within its
        target, but at least one block, so that prompts make progress. Without streams only the
        target limits a prompt.
        """
        pace = self._pace
        rows_s = self.step_s if num_decode_rows else 0.0
        most = pace.chunk_tokens if num_decode_rows else pace.most_tokens
        affordable = int((pace.target_s - rows_s) * self.prompt_tokens_per_s)
        return max(min(most, affordable), pace.least_tokens)


def _moved(believed: float, seen: float) -> float:
    return believed + TRUST * (seen - believed) if believed else seen
