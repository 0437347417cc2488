"""How much a step may hold on this machine: guessed from one timed step, kept right by all others.

Pure arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from triolet.config import EngineConfig

MEASURED_TOKENS: Final = 64
"""Tokens of the step that is timed: as many as a full decode step has rows, and enough for the
matrices to be used as in prefill."""
TRIED_TOKENS: Final = 16
"""The same where the start shall be short. A step of n tokens takes a + b * n: told from 16 tokens
the first budget is a fifth too small, told from 64 a fifth too large; each step mends it."""
MIN_FILL: Final = 0.5
"""A step that used less of the budget says little of a full one: it reads all weights, too."""
MOST_TIMES_WIDER: Final = 4
"""How many times what a step with prompts may hold at most a step without them may: what a step
computes in takes memory, which an operator bounds by `max_num_batched_tokens`."""
TRUST: Final = 0.25
"""How far one step moves the budget towards what it shows: a hiccup of the machine is forgotten
after a few steps, a busy neighbour is believed after a few."""


class Pace(NamedTuple):
    """What a worker found out about itself.

    Attributes:
      step_tokens: budget of a prefill step.
      step_s: seconds that a full step takes; a peer must be more patient than this.
      target_s: how long a step should take.
      least_tokens: a block; below it the weights are read for hardly any work.
      most_tokens: the budget that the setting allows.
      chunk_tokens: prompt tokens of a decode step beside running streams, by its setting.
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
      measured_tokens: in the step that was timed.
      elapsed_s: what it took.
      config: target and largest budget.
    """
    affordable = int(measured_tokens * config.target_step_s / max(elapsed_s, 1e-6))
    least_tokens, most_tokens = config.block_size, config.max_num_batched_tokens
    step_tokens = max(least_tokens, min(most_tokens, affordable))
    # More tokens than were timed cost more; fewer cost about the same, for the weights are read
    # all the same.
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
    """The tokens of a prefill step, following what steps really take.

    The step timed at the start ran alone; with decode, server and neighbours on the same cores the
    same step can take twice as long, and a cancel waits for it.

    Args:
      pace: what to begin with, and the bounds.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._tokens = float(pace.step_tokens)

    @classmethod
    def of_wide_steps(cls, pace: Pace, most_tokens: int) -> StepBudget:
        """Return a budget for steps in which no prompt waits for a first token.

        Their target is the same, but they hold at least as much as the step that was timed at the
        start, whose time peers are patient for: where weights are so large that a step within the
        target holds a block only, the others would read all weights for hardly any work. And they
        may hold more than a prompt's steps where a device is fast.

        Args:
          pace: of steps with prompts.
          most_tokens: that may be in one of these.
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
        """What the next step may hold."""
        return int(self._tokens)

    def took(self, num_tokens: int, elapsed_s: float) -> None:
        """Learn from a step."""
        if num_tokens < MIN_FILL * self.tokens or elapsed_s <= 0.0:
            return
        affordable = num_tokens * self._pace.target_s / elapsed_s
        bounded = max(self._pace.least_tokens, min(self._pace.most_tokens, affordable))
        self._tokens += TRUST * (bounded - self._tokens)
