"""Capture a decode step as a CUDA graph for each batch size, and replay it.

A step of a small batch is hundreds of tiny kernels, and launching them one by one takes longer than
running them. A graph needs one launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WARM_UP_RUNS: Final = 2
"""Steps before a capture: the first compiles kernels and lets libraries choose workspaces."""


class StepGraphs:
    """Captures and replays the graphs of a step.

    Args:
      compute: launches a step of a given size; reads and writes the same tensors each time.
      sizes: sizes to capture. The largest is captured first, and the others reuse its memory,
        because only one graph runs at a time.
      on_progress: called with the share of sizes captured; each may wait for a compiler.
    """

    def __init__(
        self,
        compute: Callable[[int], None],
        sizes: Sequence[int],
        on_progress: Callable[[float], None],
    ) -> None:
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        memory = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        for size in sorted(sizes, reverse=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_RUNS):
                    compute(size)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory, stream=stream):
                compute(size)
            self._graphs[size] = graph
            on_progress(len(self._graphs) / len(sizes))
        torch.cuda.synchronize()

    def replay(self, size: int) -> None:
        """Launch the step of one size."""
        self._graphs[size].replay()
