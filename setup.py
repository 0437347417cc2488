"""The compiled part of the package: one shared library of kernels for each instruction set.

All of it is optional. Where there is no compiler, or one for another processor, the installation
succeeds without, and the engine computes with torch alone. Everything else is in pyproject.toml.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("engine") / "native" / "source"
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mfma"]
BUILDS = {
    "avx512bf16": [*AVX512, "-mavx512bf16"],
    "avx512": AVX512,
    "avx2": ["-mavx2", "-mfma"],
}

setup(
    ext_modules=[
        Extension(
            f"engine.native._{build}",
            [str(SOURCES / "forward.c")],
            depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
            # OpenMP's calls, but no runtime: see engine/native/library.py.
            extra_compile_args=["-O3", "-std=c11", "-fopenmp", "-fvisibility=hidden", *flags],
            optional=True,
        )
        for build, flags in BUILDS.items()
    ]
)
