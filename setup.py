"""The compiled part of the package: one shared library of kernels for each instruction set.

All of it is optional. Where there is no compiler, or one for another processor, the installation
succeeds without, and the engine computes with torch alone. Everything else is in pyproject.toml.
"""

from __future__ import annotations

import runpy
from copy import copy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("engine") / "native"
SOURCES = NATIVE / "source"
FLAGS = runpy.run_path(str(NATIVE / "builds.py"))


class BuildApart(build_ext):
    """Compiles each build in a folder of its own: all have the same source, so the same object."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link one build, beside the others."""
        own = copy(self)
        own.build_temp = str(Path(self.build_temp) / ext.name)
        build_ext.build_extension(own, ext)


setup(
    cmdclass={"build_ext": BuildApart},
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
