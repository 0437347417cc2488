"""The compiled part of the package: one shared library of kernels for each instruction set.

All of it is optional. Where there is no compiler, or one for another processor, the installation
succeeds without, and the engine computes with torch alone. Everything else is in pyproject.toml.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("engine") / "native"
SOURCES = NATIVE / "source"
FLAGS = runpy.run_path(str(NATIVE / "builds.py"))

setup(
    # A build takes a core for ten seconds, and no build waits for another.
    options={"build_ext": {"parallel": True}},
    ext_modules=[
        Extension(
            f"engine.native._{build}",
            [str(SOURCES / "forward.c")],
            depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
            extra_compile_args=[*FLAGS["COMMON"], *flags],
            optional=True,
        )
        for build, flags in FLAGS["BUILDS"].items()
    ],
)
