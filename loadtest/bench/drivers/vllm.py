"""`python -m loadtest.bench.drivers.vllm`: vLLM's engine in a process for the engine benchmark.

Runs in an environment with a CPU build of vLLM, without Triolet.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from .loop import answer_requests, driver_parser

MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 64


class VllmSession:
    """Steps vLLM's engine explicitly, so that each step can be timed."""

    def __init__(self, vllm: Any, engine: Any) -> None:  # noqa: ANN401 - not installed here
        self._vllm = vllm
        self._engine = engine
        self._requests = 0
        self._running: list[str] = []

    def begin(self, prompts: list[list[int]], most_steps: int) -> None:
        """See loop.Session."""
        # The first sequences already decode while the other prompts are computed.
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=most_steps + 2 + len(prompts), ignore_eos=True
        )
        for prompt in prompts:
            self._requests += 1
            self._running.append(str(self._requests))
            self._engine.add_request(self._running[-1], {"prompt_token_ids": prompt}, params)
        waiting = set(self._running)
        while waiting:
            waiting -= {output.request_id for output in self._engine.step() if output.outputs}

    def step(self) -> None:
        """See loop.Session."""
        outputs = self._engine.step()
        assert len(outputs) == len(self._running), "a sequence was not part of the step"

    def end(self) -> None:
        """See loop.Session."""
        self._engine.abort_request(self._running)
        self._running = []
        while self._engine.has_unfinished_requests():
            self._engine.step()


def prepare(threads: int) -> None:
    """Set the environment variables of vLLM."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    # Cache compiled code next to the environment: the second start takes half as long.
    os.environ["VLLM_CACHE_ROOT"] = str(Path(sys.prefix) / "cache")


def main() -> None:
    """Load the model and answer requests."""
    arguments = driver_parser(__doc__).parse_args()
    prepare(arguments.threads)

    def open_session() -> tuple[VllmSession, str]:
        vllm = import_module("vllm")
        options = vllm.EngineArgs(
            model=str(arguments.model),
            dtype=arguments.dtype,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        return VllmSession(vllm, vllm.LLMEngine.from_engine_args(options)), vllm.__version__

    answer_requests(open_session)


if __name__ == "__main__":
    main()
