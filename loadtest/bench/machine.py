"""What a benchmark ran on, so that figures from two machines are never mistaken for one another."""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch

from engine.native.library import load_library

_INTERESTING: Final = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_READ_BYTES: Final = 256 * 2**20
_SIDE: Final = 2048
_REPETITIONS: Final = 8
_ROUNDS: Final = 2_000
_SLICE_BYTES: Final = 32 * 2**20
"""Both limits are taken in pieces of about a millisecond, of which the best one counts: so a busy
machine shows them too. A slice is read again only after all others, so no cache helps."""


def describe(threads: int) -> dict[str, Any]:
    """Return the machine, its load, and its two limits as just now they are reached at best, by
    torch or by our kernels' innermost loops."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    flags = set(cpuinfo.partition("\nflags")[2].partition("\n")[0].split())
    torch.set_num_threads(threads)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": model[1] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "instructions": [flag for flag in _INTERESTING if flag in flags],
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "read_gb_per_s": round(_read_speed(), 1),
        "bf16_gflop_per_s": round(_product_speed(torch.bfloat16)),
        "fp32_gflop_per_s": round(_product_speed(torch.float32)),
    }


def _best_s(call: Any, repetitions: int = _REPETITIONS) -> float:  # noqa: ANN401 - any callable
    times = []
    for _ in range(repetitions):
        began_at = perf_counter()
        call()
        times.append(perf_counter() - began_at)
    return min(times)


def _read_speed() -> float:
    memory = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    speeds = [_READ_BYTES / _best_s(memory.sum)]
    if (library := load_library()) is not None:
        speeds += [
            library.read_speed(memory.data_ptr() + first, _SLICE_BYTES, torch.get_num_threads())
            for _ in range(_REPETITIONS)
            for first in range(0, _READ_BYTES, _SLICE_BYTES)
        ]
    return max(speeds) / 1e9


def _product_speed(dtype: torch.dtype) -> float:
    left, right = (torch.randn(_SIDE, _SIDE).to(dtype) for _ in range(2))
    speeds = [2 * _SIDE**3 / _best_s(lambda: left @ right)]
    if (library := load_library()) is not None:
        speeds += [
            library.product_speed(dtype is torch.bfloat16, _ROUNDS, torch.get_num_threads())
            for _ in range(10 * _REPETITIONS)
        ]
    return float(max(speeds) / 1e9)
