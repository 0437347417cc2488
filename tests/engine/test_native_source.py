"""Tests of building the C kernels: the source compiles without warnings, and an installation
without a compiler succeeds."""

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
"""The smallest build; `make sanitize` tests all builds."""
INSTRUCTIONS = {flag for flags in BUILDS.values() for flag in flags}

NOTES_ITS_FLAGS = """#!/bin/sh
words="$*"
while [ "$1" != -o ]; do
    case "$1" in *.o) object=$1 ;; esac
    shift
done
case "$words" in
    *" -c "*) echo "$words" > "$2"; sleep 0.5 ;;
    *) cp "$object" "$2" ;;
esac
"""
"""A fake compiler: an object is the compiler's arguments, and linking copies it. Builds overlap."""


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


def install(folder: Path, cc: str) -> None:
    """Build the extension as an installation does, with a given compiler."""
    folders = ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", *folders],
        cwd=ROOT,
        env=os.environ | {"CC": cc},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_builds_that_are_made_side_by_side_do_not_mix(tmp_path: Path) -> None:
    """A build with another build's instructions would crash on a CPU without them."""
    (tmp_path / "cc").write_text(NOTES_ITS_FLAGS)
    (tmp_path / "cc").chmod(0o700)
    install(tmp_path, str(tmp_path / "cc"))
    made = {path.name.split(".")[0]: path.read_text() for path in tmp_path.rglob("*.so")}
    assert made.keys() == {f"_{build}" for build in BUILDS}
    for build, flags in BUILDS.items():
        said = made[f"_{build}"].split()
        assert tuple(word for word in said if word in INSTRUCTIONS) == flags


@pytest.mark.slow
def test_an_installation_without_a_compiler_succeeds_without_kernels(tmp_path: Path) -> None:
    install(tmp_path, "/bin/false")
    assert list(tmp_path.rglob("*.so")) == []
    assert library_path(BUILD) is not None, "what is installed here is another matter"
