"""Build the C kernels: one shared library per instruction set.

The kernels are optional. Without a suitable compiler the installation succeeds, and the engine
computes with torch.
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
    """Compiles each build in a separate folder, because all have the same object file names."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link one build."""
        own = copy(self)
        own.build_temp = str(Path(self.build_temp) / ext.name)
        build_ext.build_extension(own, ext)


setup(
    cmdclass={"build_ext": BuildApart},
    # A build takes ten seconds of one core, and builds are independent.
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
