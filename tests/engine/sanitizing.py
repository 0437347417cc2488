"""Compiles the C kernels with sanitizers and runs their test driver: `python -m
tests.engine.sanitizing`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from engine.native.builds import BUILDS, COMMON
from engine.native.library import load_build

DRIVER: Final = Path(__file__).parent / "sanitize.c"
WARNINGS: Final = ("-Wall", "-Wextra", "-Wshadow", "-Werror")
SANITIZERS: Final = ("-g1", "-Og", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
COMPILE_TIMEOUT_S: Final = 240
HEAD_DIMS: Final = (16, 64)
"""Narrow heads, and those that are wide enough for a way of their own where rows are few."""


def compiler() -> str | None:
    """Return a C compiler, if there is one."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def compile_with(flags: tuple[str, ...], source: Path, to: Path | None = None) -> str:
    """Compile one file, or only check it. Return the compiler's messages, empty on success."""
    name = compiler()
    assert name is not None, "the caller has looked"
    what = ["-fsyntax-only"] if to is None else ["-o", str(to)]
    done = subprocess.run(
        [name, *COMMON, *flags, str(source), *what, "-lm"],
        capture_output=True,
        text=True,
        check=False,
        timeout=COMPILE_TIMEOUT_S,
    )
    return done.stderr or ("" if done.returncode == 0 else f"exit code {done.returncode}")


def run_driver(
    build: str, folder: Path, *arguments: str, head_dim: int = HEAD_DIMS[0]
) -> tuple[int, str]:
    """Compile the driver for a build unless it exists, and run it. Return exit code and output."""
    program = folder / f"{build}-{head_dim}"
    if not program.exists():
        flags = (*SANITIZERS, *BUILDS[build], f"-DDIM={head_dim}")
        said = compile_with(flags, DRIVER, program)
        if said:
            return -1, said
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    """Run the driver of each build that this machine can run."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for build in BUILDS:
            if load_build(build) is None:
                sys.stdout.write(f"{build}: not for this machine\n")
                continue
            for head_dim in HEAD_DIMS:
                code, said = run_driver(build, Path(folder), head_dim=head_dim)
                sys.stdout.write(f"{build}, heads of {head_dim}: {said}")
                failed += code != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
