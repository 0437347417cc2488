"""transformers' `generate`: `python -m loadtest.bench.peer_transformers`.

Runs where torch and transformers are installed, and uses nothing of Triolet.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from .peer_loop import answer_requests


class _Clock(LogitsProcessor):
    """Notes when each step's logits are there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(perf_counter())
        return scores


class TransformersSession:
    """One model in memory."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - transformers has no type for it
        self._model = model

    def run(self, prompts: list[list[int]], steps: int) -> tuple[float, list[float]]:
        """See peer_loop.Session."""
        clock = _Clock()
        input_ids = torch.tensor(prompts)
        began_at = perf_counter()
        with torch.inference_mode():
            self._model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=steps + 1,
                min_new_tokens=steps + 1,
                do_sample=False,
                temperature=None,
                top_p=None,
                logits_processor=LogitsProcessorList([clock]),
            )
        ends = clock.times
        return ends[0] - began_at, [b - a for a, b in pairwise(ends)]


def main() -> None:
    """Load and answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    answer_requests(
        lambda: TransformersSession(
            AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
        )
    )


if __name__ == "__main__":
    main()
