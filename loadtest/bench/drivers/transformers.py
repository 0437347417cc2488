"""`python -m loadtest.bench.drivers.transformers`: transformers in a process for benchmarks.

Does the forward passes of `generate` over a growing cache, step by step, without its overhead. Runs
in an environment with torch and transformers, without Triolet.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from .loop import answer_requests, driver_parser


class TransformersSession:
    """One loaded model."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - transformers has no type for it
        self._model = model
        self._cache: Any = None
        self._last = torch.empty(0)

    def begin(self, prompts: list[list[int]], most_steps: int) -> None:
        """See loop.Session."""
        self._cache = transformers.DynamicCache()
        self._forward(torch.tensor(prompts))

    def step(self) -> None:
        """See loop.Session."""
        self._forward(self._last)

    def end(self) -> None:
        """See loop.Session."""
        self._cache = None

    def _forward(self, input_ids: torch.Tensor) -> None:
        with torch.inference_mode():
            output = self._model(
                input_ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
            self._last = output.logits[:, -1:].argmax(-1)


def main() -> None:
    """Load the model and answer requests."""
    arguments = driver_parser(__doc__).parse_args()
    torch.set_num_threads(arguments.threads)

    def open_session() -> tuple[TransformersSession, str]:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=getattr(torch, arguments.dtype)
        )
        version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        return TransformersSession(model), version

    answer_requests(open_session)


if __name__ == "__main__":
    main()
