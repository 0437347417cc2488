"""Choose the token budget of a step: estimated from one timed step, then adjusted by every step.

Pure arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from triolet.config import EngineConfig

MEASURED_TOKENS: Final = 64
"""Tokens of the timed step: as many as a full decode step has rows, and enough for matrix products
to run as in prefill."""
TRIED_TOKENS: Final = 16
"""The same for a quick start. A step of n tokens takes a + b * n: estimated from 16 tokens the
first budget is a fifth too small, from 64 a fifth too large. Each step corrects it."""
MIN_FILL: Final = 0.5
"""Steps that use a smaller share of the budget are ignored: they too read all weights, so their
time says little about a full step."""
MOST_TIMES_WIDER: Final = 4
"""Largest budget of a step without waiting prompts, as a multiple of that with prompts: activations
take memory, which the operator limits by `max_num_batched_tokens`."""
TRUST: Final = 0.25
"""Weight of one step in the moving average: a short stall is forgotten after a few steps, and a
lasting load is followed after a few."""


class Pace(NamedTuple):
    """Measured step budget and duration of a worker.

    Attributes:
      step_tokens: token budget of a prefill step.
      step_s: seconds of a full step; peers' timeouts must be longer.
      target_s: target duration of a step.
      least_tokens: smallest budget, one block; below it, reading the weights dominates.
      most_tokens: largest budget, by the setting.
      chunk_tokens: prompt tokens in a step with running streams, by the setting.
    """

    step_tokens: int
    step_s: float
    target_s: float
    least_tokens: int
    most_tokens: int
    chunk_tokens: int


def pace_of(measured_tokens: int, elapsed_s: float, config: EngineConfig) -> Pace:
    """Return the budget that keeps a step within `target_step_s`.

    Args:
      measured_tokens: tokens of the timed step.
      elapsed_s: duration of the timed step.
      config: target duration and largest budget.
    """
    affordable = int(measured_tokens * config.target_step_s / max(elapsed_s, 1e-6))
    least_tokens, most_tokens = config.block_size, config.max_num_batched_tokens
    step_tokens = max(least_tokens, min(most_tokens, affordable))
    # More tokens than were timed take longer. Fewer take about the same time, because all weights
    # are read anyway.
    step_s = elapsed_s * max(1.0, step_tokens / measured_tokens)
    return Pace(
        step_tokens,
        step_s,
        config.target_step_s,
        least_tokens,
        most_tokens,
        config.prompt_chunk_tokens,
    )


class StepBudget:
    """The token budget of a prefill step, adjusted to measured durations.

    The step timed at start ran alone. With decode, server and other programs on the same cores the
    same step can take twice as long, and a cancel waits for it.

    Args:
      pace: initial budget and bounds.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._tokens = float(pace.step_tokens)

    @classmethod
    def of_wide_steps(cls, pace: Pace, most_tokens: int) -> StepBudget:
        """Return a budget for steps in which no prompt waits for its first token.

        They have the same target duration, but hold at least as many tokens as the step timed at
        start, which peers' timeouts allow for: with very large weights, a step within the target
        would hold one block only and read all weights for little work. On a fast device they may
        hold more than steps with prompts.

        Args:
          pace: pace of steps with prompts.
          most_tokens: most tokens of a step.
        """
        most = max(pace.most_tokens, min(most_tokens, MOST_TIMES_WIDER * pace.most_tokens))
        least = min(max(pace.least_tokens, MEASURED_TOKENS), pace.most_tokens)
        affordable = int(pace.step_tokens * pace.target_s / max(pace.step_s, 1e-6))
        return cls(
            pace._replace(
                step_tokens=max(least, min(most, affordable)), least_tokens=least, most_tokens=most
            )
        )

    @property
    def tokens(self) -> int:
        """Token budget of the next step."""
        return int(self._tokens)

    def took(self, num_tokens: int, elapsed_s: float) -> None:
        """Adjust the budget to a step's duration."""
        if num_tokens < MIN_FILL * self.tokens or elapsed_s <= 0.0:
            return
        affordable = num_tokens * self._pace.target_s / elapsed_s
        bounded = max(self._pace.least_tokens, min(self._pace.most_tokens, affordable))
        self._tokens += TRUST * (bounded - self._tokens)
