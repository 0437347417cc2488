"""Tests that the Triton kernels compile for an H100 and that none is compiled after the warm-up.
They need no GPU."""

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


BOTH = """
import os, sys
from tests.engine.gpu import compile_kernels, serving_launches

child = os.fork()
if child == 0:
    code = serving_launches.main()
    sys.stdout.flush()
    os._exit(code)
ended = os.waitpid(child, 0)[1]
print("kernels:")
sys.argv[1:] = ["--head-dims", "128", "--dtypes", "bfloat16"]
sys.exit(compile_kernels.main() or os.waitstatus_to_exitcode(ended))
"""
"""A process notes the first launch of each kernel only, so these are two, which import Triton
once."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Output of the two modules, run in processes that do not interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, "-c", BOTH],
        cwd=Path(__file__).parents[3],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    launches, _, kernels = finished.stdout.partition("kernels:\n")
    return launches, kernels


def test_every_kernel_compiles_as_it_is_launched(printed: tuple[str, str]) -> None:
    _, *rows = [line.split("\t") for line in printed[1].splitlines()]
    copies = {row[0]: int(row[-1]) for row in rows}
    assert len(copies) == 10
    # Keys and values are copied asynchronously only if strides are known to be aligned.
    assert copies["decode_splits_kernel"] > 0
    assert copies["prefill_kernel"] > 0
    assert sum(row[0] == "prefill_kernel" for row in rows) == 1


def test_serving_compiles_nothing_that_the_warm_up_has_not(printed: tuple[str, str]) -> None:
    assert printed[0] == "11 in the warm-up\n"
