"""How fast a loaded model is: the rate of prompts, and what a decode step takes.

To be measured on the device thread, before there are requests, on a machine with nothing else to
do.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy

from triolet.errors import ConfigError
from triolet.sampling import SamplingParams

from ..batch import SampleSpec, StepRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..load import Engine

MAX_PROMPT_TOKENS: Final = 512
"""Of the step that is timed: beyond that a rate changes little."""
MAX_ROWS: Final = 8
"""Of the widest decode step that is timed: two widths suffice for a line."""
SHORT_TOKENS: Final = 16
LONG_TOKENS: Final = 1024
"""Attended to by each row of a decode step that is timed: little beside the weights, and enough to
be seen."""
REPETITIONS: Final = 7
"""Of each step; the fastest counts, which other programs have disturbed least."""
_GREEDY: Final = SamplingParams(temperature=0.0)
_LEASE: Final = "capacity"


class Rates(NamedTuple):
    """What was measured.

    Attributes:
      prefill_tokens_per_s: of a full step.
      step_s: of any decode step.
      row_s: of each row more.
      kv_token_s: of each token that a row attends to.
    """

    prefill_tokens_per_s: float
    step_s: float
    row_s: float
    kv_token_s: float


def measure_rates(engine: Engine, most_tokens: int, most_rows: int) -> Rates:
    """Time prompts and decode steps.

    Args:
      engine: that is loaded.
      most_tokens: of a step.
      most_rows: of a decode step.

    Raises:
      ConfigError: the KV pool or the context holds no prompt of SHORT_TOKENS.
    """
    block_size, available = engine.pool.layout.block_size, engine.ledger.available_blocks
    longest = min(engine.max_model_len, available * block_size)
    if longest <= SHORT_TOKENS:
        raise ConfigError(
            f"kv_pool_bytes and max_model_len leave room for {longest} tokens, and a measurement "
            f"takes {SHORT_TOKENS + 1}; raise them"
        )
    num_prompt = min(MAX_PROMPT_TOKENS, most_tokens, longest - 1)
    num_rows = max(1, min(MAX_ROWS, most_rows, available // -(-(SHORT_TOKENS + 1) // block_size)))
    blocks = engine.ledger.lease(_LEASE, available)
    try:
        prompt = [StepRow([0] * num_prompt, 0, blocks, SampleSpec(_GREEDY, 0))]
        prefill_s = _time_of(engine, prompt)
        steps = []
        for rows in (1, num_rows):
            own = available // rows  # blocks of each row
            for tokens in (SHORT_TOKENS, min(LONG_TOKENS, own * block_size - 1, longest - 1)):
                spec = SampleSpec(_GREEDY, 1)
                step = [
                    StepRow([0], tokens, blocks[row * own :][:own], spec, is_decode=True)
                    for row in range(rows)
                ]
                steps.append((rows, rows * tokens, _time_of(engine, step)))
    finally:
        engine.ledger.release(_LEASE)
    return Rates(num_prompt / prefill_s, *step_model(steps))


def step_model(steps: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """Return seconds of a step, of a row and of a token in the KV, none below 0: least squares.

    Args:
      steps: rows, tokens in the KV of all of them, and seconds of each.
    """
    seconds = numpy.array([one[2] for one in steps])
    columns = numpy.array([(1.0, rows, tokens) for rows, tokens, _ in steps])
    used = [0, 1, 2]
    while used:
        found, *_ = numpy.linalg.lstsq(columns[:, used], seconds, rcond=None)
        below = [place for place, value in zip(used, found, strict=True) if value < 0.0]
        if not below:
            break
        # Noise made it cheaper than nothing: it is nothing, and the others take its part.
        used = [place for place in used if place not in below]
    fitted = dict(zip(used, found.tolist(), strict=True)) if used else {}
    return fitted.get(0, 0.0), fitted.get(1, 0.0), fitted.get(2, 0.0)


def _time_of(engine: Engine, rows: Sequence[StepRow]) -> float:
    engine.runner.step(rows)  # what a step needs is loaded by the first of its kind
    took = []
    for _ in range(REPETITIONS):
        began_at = perf_counter()
        engine.runner.step(rows)
        took.append(perf_counter() - began_at)
    return min(took)
