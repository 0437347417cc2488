"""`python -m loadtest.bench.drivers.openvino`: OpenVINO GenAI in a process for benchmarks.

Runs in an environment with openvino_genai and optimum-intel, without Triolet. The model is exported
once to OpenVINO's format, next to the original.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .loop import answer_requests, driver_parser

if TYPE_CHECKING:
    from pathlib import Path

CACHE_GB = 2
MAX_NUM_BATCHED_TOKENS = 2048
PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}


class OpenVinoSession:
    """A pipeline with continuous batching that is stepped explicitly."""

    def __init__(self, model: Path, threads: int, dtype: str) -> None:
        self._genai = import_module("openvino_genai")
        self._numpy = import_module("numpy")
        self._tensor = import_module("openvino").Tensor
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": PRECISIONS[dtype],
            "KV_CACHE_PRECISION": PRECISIONS[dtype],
        }
        self._pipeline = self._genai.ContinuousBatchingPipeline(
            str(model), scheduler, "CPU", properties
        )
        self._requests = 0
        self._handles: list[Any] = []

    def begin(self, prompts: list[list[int]], most_steps: int) -> None:
        """See loop.Session."""
        # The first sequences already decode while the other prompts are computed.
        config = self._genai.GenerationConfig(
            max_new_tokens=most_steps + 2 + len(prompts), ignore_eos=True, do_sample=False
        )
        for prompt in prompts:
            ids = self._tensor(self._numpy.array([prompt], dtype="int64"))
            self._handles.append(self._pipeline.add_request(self._requests, ids, config))
            self._requests += 1
        waiting = list(self._handles)
        while waiting:
            self._pipeline.step()
            waiting = [handle for handle in waiting if not handle.can_read()]

    def step(self) -> None:
        """See loop.Session."""
        self._pipeline.step()

    def end(self) -> None:
        """See loop.Session."""
        for handle in self._handles:
            handle.cancel()
        self._handles = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


def export(model: Path, to: Path) -> None:
    """Convert a model to OpenVINO's format, atomically."""
    partial = to.with_name(to.name + ".partial")
    command = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", str(model)]
    kind = ["--task", "text-generation-with-past", "--weight-format", "fp16"]
    subprocess.run([sys.executable, *command, *kind, str(partial)], check=True)
    partial.rename(to)


def main() -> None:
    """Load the model and answer requests."""
    arguments = driver_parser(__doc__).parse_args()
    exported = arguments.model / "openvino"
    if not exported.exists():
        export(arguments.model, exported)

    def open_session() -> tuple[OpenVinoSession, str]:
        session = OpenVinoSession(exported, arguments.threads, arguments.dtype)
        return session, str(import_module("openvino_genai").__version__)

    answer_requests(open_session)


if __name__ == "__main__":
    main()
