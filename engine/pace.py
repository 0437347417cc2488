"""How much a step may hold on this machine, from one timed step. Pure arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from triolet.config import EngineConfig

MEASURED_TOKENS: Final = 64
"""Tokens of the step that is timed: as many as a full decode step has rows, and enough for the
matrices to be used as in prefill."""


class Pace(NamedTuple):
    """What a worker found out about itself.

    Attributes:
      step_tokens: budget of a prefill step.
      step_s: seconds that a full step takes; a peer must be more patient than this.
    """

    step_tokens: int
    step_s: float


def pace_of(measured_tokens: int, elapsed_s: float, config: EngineConfig) -> Pace:
    """Return the budget that keeps a step within `target_step_s`.

    Args:
      measured_tokens: in the step that was timed.
      elapsed_s: what it took.
      config: target and largest budget. The least is a block: below it the weights are read for
        hardly any work.
    """
    affordable = int(measured_tokens * config.target_step_s / max(elapsed_s, 1e-6))
    step_tokens = max(config.block_size, min(config.max_num_batched_tokens, affordable))
    # More tokens than were timed cost more; fewer cost about the same, for the weights are read
    # all the same.
    return Pace(step_tokens, elapsed_s * max(1.0, step_tokens / measured_tokens))
