"""What a GPU would compile, which needs none: that it fits, and that no request waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import HAS_TRITON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
]


def run_compiled(module: str, *arguments: str, cache: Path) -> str:
    """Run a module in a process in which nothing is interpreted, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, "-m", f"tests.engine.gpu.{module}", *arguments],
        cwd=Path(__file__).parents[3],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_every_kernel_compiles_as_it_is_launched(tmp_path: Path) -> None:
    options = ("--head-dims", "128", "--dtypes", "bfloat16")
    printed = run_compiled("compile_kernels", *options, cache=tmp_path)
    _, *rows = [line.split("\t") for line in printed.splitlines()]
    copies = {row[0]: int(row[-1]) for row in rows}
    assert len(copies) == 10
    # Keys and values come by asynchronous copies only where strides are known to be aligned.
    assert copies["decode_splits_kernel"] > 0
    assert copies["prefill_kernel"] > 0
    assert sum(row[0] == "prefill_kernel" for row in rows) == 1


def test_serving_compiles_nothing_that_the_warm_up_has_not(tmp_path: Path) -> None:
    assert run_compiled("serving_launches", cache=tmp_path) == "11 in the warm-up\n"
