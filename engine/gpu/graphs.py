"""Captures a step as a CUDA graph for each size of batch, and replays it.

A step of a small batch is hundreds of tiny kernels; launching them one by one takes longer than
running them. A graph is launched as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WARM_UP_RUNS: Final = 2
"""Before a capture: kernels are compiled and libraries choose their workspaces in the first."""


class StepGraphs:
    """Replays a step's graphs.

    Args:
      compute: launches a step of some size; reads and writes the same tensors each time.
      sizes: of the steps to capture. The largest comes first: what it allocates serves all
        others, which share its memory because only one runs at a time.
      on_progress: told the share of sizes that are captured: each may wait for a compiler.
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
