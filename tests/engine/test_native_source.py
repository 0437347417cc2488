"""The kernels' source is clean, and an installation without a compiler does without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.native.builds import BUILDS
from engine.native.library import library_path, load_build

from .sanitizing import WARNINGS, compile_with, compiler, run_driver

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "engine" / "native" / "source" / "forward.c"
BUILD = "avx2"
"""The smallest; `make sanitize` takes all."""


@pytest.fixture(autouse=True)
def a_compiler_for_this_processor() -> None:
    """Skip where nothing can be compiled."""
    if compiler() is None or load_build(BUILD) is None:
        pytest.skip("no C compiler, or not for this processor")


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_the_source_compiles_without_warnings(build: str) -> None:
    assert compile_with((*WARNINGS, *BUILDS[build]), SOURCE) == ""


@pytest.mark.long
@pytest.mark.slow
def test_the_kernels_touch_nothing_that_is_not_theirs(tmp_path: Path) -> None:
    code, said = run_driver(BUILD, tmp_path)
    if code == -1 and "sanitize" in said:
        pytest.skip(f"the compiler has no sanitizers: {said}")
    assert (code, said) == (0, "clean\n")
    code, said = run_driver(BUILD, tmp_path, "spoil")
    assert code != 0, "memory that is too short must be found"
    assert "AddressSanitizer" in said


@pytest.mark.slow
def test_an_installation_without_a_compiler_succeeds_without_kernels(tmp_path: Path) -> None:
    folders = ["--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "temp"]
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", *folders],
        cwd=ROOT,
        env=os.environ | {"CC": "/bin/false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("*.so")) == []
    assert library_path(BUILD) is not None, "what is installed here is another matter"
