"""Measure a loaded model's speed: the prefill rate, and the duration of decode steps.

Runs on the device thread before the first request, on an otherwise idle machine.
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
"""Most tokens of the timed step: the rate changes little beyond that."""
MAX_ROWS: Final = 8
"""Rows of the widest timed decode step: two widths are enough for a line."""
SHORT_TOKENS: Final = 16
LONG_TOKENS: Final = 1024
"""Context of each row of a timed decode step: cheap compared with the weights, but measurable."""
REPETITIONS: Final = 7
"""Repetitions of each step; the fastest counts, because other programs disturbed it least."""
_GREEDY: Final = SamplingParams(temperature=0.0)
_LEASE: Final = "capacity"


class Rates(NamedTuple):
    """The measured rates.

    Attributes:
      prefill_tokens_per_s: prefill rate of a full step.
      step_s: fixed seconds per decode step.
      row_s: further seconds per row.
      kv_token_s: further seconds per token that a row attends to.
    """

    prefill_tokens_per_s: float
    step_s: float
    row_s: float
    kv_token_s: float


def measure_rates(engine: Engine, most_tokens: int, most_rows: int) -> Rates:
    """Time prompts and decode steps.

    Args:
      engine: the loaded model.
      most_tokens: most tokens of a step.
      most_rows: most rows of a decode step.

    Raises:
      ConfigError: the KV pool or the context does not hold a prompt of SHORT_TOKENS.
    """
    block_size, available = engine.pool.layout.block_size, engine.ledger.available_blocks
    longest = min(engine.max_model_len, available * block_size)
    if longest <= SHORT_TOKENS:
        raise ConfigError(
            f"kv_pool_bytes and max_model_len leave room for {longest} tokens, but a measurement "
            f"needs {SHORT_TOKENS + 1}; raise them"
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
    """Fit seconds per step, per row and per KV token, none below 0, by least squares.

    Args:
      steps: (rows, KV tokens of all rows, seconds) of each step.
    """
    seconds = numpy.array([one[2] for one in steps])
    columns = numpy.array([(1.0, rows, tokens) for rows, tokens, _ in steps])
    used = [0, 1, 2]
    while used:
        found, *_ = numpy.linalg.lstsq(columns[:, used], seconds, rcond=None)
        below = [place for place, value in zip(used, found, strict=True) if value < 0.0]
        if not below:
            break
        # Noise made the cost negative: set it to 0 and fit the others again.
        used = [place for place in used if place not in below]
    fitted = dict(zip(used, found.tolist(), strict=True)) if used else {}
    return fitted.get(0, 0.0), fitted.get(1, 0.0), fitted.get(2, 0.0)


def _time_of(engine: Engine, rows: Sequence[StepRow]) -> float:
    engine.runner.step(rows)  # the first step of a kind loads its kernels
    took = []
    for _ in range(REPETITIONS):
        began_at = perf_counter()
        engine.runner.step(rows)
        took.append(perf_counter() - began_at)
    return min(took)
