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

_INTERESTING: Final = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_READ_BYTES: Final = 256 * 2**20
_SIDE: Final = 2048


def describe(threads: int) -> dict[str, Any]:
    """Return the machine, its load, and its two limits as torch reaches them just now."""
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


def _best_s(call: Any, repetitions: int = 5) -> float:  # noqa: ANN401 - any callable
    times = []
    for _ in range(repetitions):
        began_at = perf_counter()
        call()
        times.append(perf_counter() - began_at)
    return min(times)


def _read_speed() -> float:
    memory = torch.zeros(_READ_BYTES // 8, dtype=torch.int64)
    return _READ_BYTES / _best_s(memory.sum) / 1e9


def _product_speed(dtype: torch.dtype) -> float:
    left, right = (torch.randn(_SIDE, _SIDE).to(dtype) for _ in range(2))
    return float(2 * _SIDE**3 / _best_s(lambda: left @ right) / 1e9)
