"""Measure the machine's limits: memory bandwidth and multiplications per second."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from engine.native.library import load_library

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.native.library import Library

READ_BYTES: Final = 256 * 2**20
SLICE_BYTES: Final = 32 * 2**20
"""Both limits are measured in pieces of about a millisecond. The best piece counts, so that other
load does not matter. A slice is read again only after all others, so that caches do not help."""
SIDE: Final = 1024
"""Size of the matrices that torch multiplies."""
REPETITIONS: Final = 8
ROUNDS: Final = 2_000
NAIVE: Final = (
    "without AVX-512 torch multiplies bf16 by a plain loop, many times slower than float32 "
    "(--dtype float32 includes it)"
)


class Limits(NamedTuple):
    """Measured limits of the machine.

    Attributes:
      read_gb_per_s: memory bandwidth.
      gflop_per_s: speed of matrix products.
      source: library and dtype of the products.
    """

    read_gb_per_s: float
    gflop_per_s: float
    source: str

    def __str__(self) -> str:
        return (
            f"{self.read_gb_per_s:.1f} GB/s of memory reads, {self.gflop_per_s:,.0f} GFLOP/s of "
            f"{self.source}"
        )


def torch_is_fast_in(dtype: str) -> bool:
    """Return whether torch multiplies this dtype with the CPU's vector instructions."""
    if dtype != "bfloat16":
        return True
    # Large products use oneDNN, and vector times matrix is in torch itself: both need AVX-512.
    is_wide = torch.backends.cpu.get_cpu_capability() != "AVX2"
    return (
        is_wide
        and hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def why_slow(dtype: str, is_fast: Callable[[str], bool] = torch_is_fast_in) -> str | None:
    """Return why engines that multiply with torch are slow in this dtype here, or None."""
    return None if is_fast(dtype) else NAIVE


def dtype_here(is_fast: Callable[[str], bool] = torch_is_fast_in) -> str:
    """Return the dtypes in which Triolet's engine is fast here, bfloat16 first."""
    return "bfloat16" if load_library() is not None or is_fast("bfloat16") else "float32"


def measure_limits(
    threads: int,
    dtype: str,
    library: Library | None,
    is_fast: Callable[[str], bool] = torch_is_fast_in,
) -> Limits:
    """Return the best speed of torch and of the innermost loops of Triolet's kernels.

    Args:
      threads: number of computing threads.
      dtype: dtype of the products; float32 is used if neither library is fast in it.
      library: Triolet's kernels, or None.
      is_fast: returns whether torch is fast in a dtype.
    """
    torch.set_num_threads(threads)
    speeds: dict[str, float] = {}
    if library is not None:
        takes_bf16 = dtype == "bfloat16"
        name = f"{dtype} products (our {library.build} kernels)"
        speeds[name] = max(
            library.product_speed(takes_bf16, ROUNDS, threads) for _ in range(10 * REPETITIONS)
        )
    if is_fast(dtype) or not speeds:
        fast = dtype if is_fast(dtype) else "float32"
        speeds[f"{fast} products (torch)"] = _torch_speed(getattr(torch, fast))
    source = max(speeds, key=speeds.__getitem__)
    return Limits(
        round(_read_speed(library, threads) / 1e9, 1), round(speeds[source] / 1e9, 1), source
    )


def _best_s(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPETITIONS):
        began_at = perf_counter()
        call()
        times.append(perf_counter() - began_at)
    return min(times)


def _torch_speed(dtype: torch.dtype) -> float:
    left, right = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))
    return 2 * SIDE**3 / _best_s(lambda: torch.mm(left, right))


def _read_speed(library: Library | None, threads: int) -> float:
    memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    speeds = [READ_BYTES / _best_s(memory.sum)]
    if library is not None:
        speeds += [
            library.read_speed(memory.data_ptr() + first, SLICE_BYTES, threads)
            for _ in range(REPETITIONS)
            for first in range(0, READ_BYTES, SLICE_BYTES)
        ]
    return max(speeds)
