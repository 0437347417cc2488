"""vLLM's engine in its own process: `python -m loadtest.bench.peer_vllm`.

Runs in an environment where vLLM is installed, and uses nothing of Triolet.
"""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from itertools import pairwise
from time import perf_counter
from typing import Any

from .peer_loop import answer_requests


class VllmSession:
    """Steps vLLM's engine by hand, so that each step can be timed."""

    def __init__(self, vllm: Any, engine: Any) -> None:  # noqa: ANN401 - not installed here
        self._vllm = vllm
        self._engine = engine
        self._requests = 0

    def run(self, prompts: list[list[int]], steps: int) -> tuple[float, list[float]]:
        """See peer_loop.Session."""
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
        began_at = perf_counter()
        for prompt in prompts:
            self._requests += 1
            self._engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, params)
        ends: list[float] = []
        started: set[str] = set()
        while self._engine.has_unfinished_requests():
            started |= {output.request_id for output in self._engine.step() if output.outputs}
            if len(started) == len(prompts):
                ends.append(perf_counter())
        return ends[0] - began_at, [b - a for a, b in pairwise(ends)][:steps]


def main() -> None:
    """Load and answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

    def open_session() -> VllmSession:
        vllm = import_module("vllm")
        options = vllm.EngineArgs(
            model=arguments.model,
            dtype=arguments.dtype,
            max_model_len=4096,
            max_num_seqs=64,
            enable_prefix_caching=False,
        )
        return VllmSession(vllm, vllm.LLMEngine.from_engine_args(options))

    answer_requests(open_session)


if __name__ == "__main__":
    main()
